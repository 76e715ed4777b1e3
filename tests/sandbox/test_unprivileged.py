"""Sandboxes without root: the same but for limits of memory and disk, which `capabilities` says. And under Podman.

Needs root to become an ordinary user, and a container engine: `scripts/test.sh` starts one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import as_user
import docker
import podman
import pytest
import swe_repository
from environments import save_image
from faults import IMAGE, list_processes
from serving import wait_until

from polar_trl.errors import ConfigError
from polar_trl.harness.install import NODE
from polar_trl.sandbox import _require_limits, build_backend
from polar_trl.sandbox.base import Capabilities
from polar_trl.sandbox.docker.backend import OWNER_LABEL
from polar_trl.sandbox.limits import Limits

pytestmark = pytest.mark.containers

SCRIPT = Path(__file__).parents[1] / "helpers" / "ordinary_user.py"


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="polar-user-"))  # and not tmp_path, which is root's alone
    yield folder
    shutil.rmtree(folder)


def report_of(*arguments: str, home: Path, engine: Path | None = None) -> dict[str, Any]:
    with as_user.start(SCRIPT.read_text(), *arguments, home=home, engine=engine) as script:
        text, _ = script.communicate(timeout=600)
    assert script.returncode == 0
    report: dict[str, Any] = json.loads(text)
    return report


def test_bubblewrap(home: Path) -> None:
    report = report_of("bwrap", home=home)
    assert report["capabilities"] == {
        "cuts_network": True,
        "limits_memory": False,
        "limits_disk": False,
        "uses_images": True,
    }
    assert (report["hog"][0], report["out_of_memory"]) == (1, False)  # a process' own memory has an end
    require_a_sandbox(report)


def test_bubblewrap_with_an_image(home: Path) -> None:
    report = report_of("image", save_image(IMAGE, home), home=home)
    assert (report["hog"][0], report["out_of_memory"]) == (1, False)
    require_a_sandbox(report, name_inside=0)


def test_a_row_of_swe_bench_in_bubblewrap(home: Path) -> None:
    with find_cache_of_agents(home):
        report = report_of("swe", *swe_repository.save_swe_image(home), home=home)
    assert report == {"sessions": [[None, "completed", 2, 1.0], [None, "completed", 2, 0.0]], "left": []}


@pytest.mark.parametrize("has_image", [False, True])
def test_what_bubblewrap_holds_and_what_it_does_not(home: Path, has_image: bool) -> None:
    script = "import sys; from polar_trl.cli import main; sys.exit(main(sys.argv[1:]))"
    image = ("--image", save_image(IMAGE, home)) if has_image else ()
    command = ("doctor", "--security", "--sandbox", "bwrap", "--json", *image)
    with as_user.start(script, *command, home=home) as doctor:
        text, _ = doctor.communicate(timeout=600)
    rows = json.loads(text)["rows"]
    assert {row["name"] for row in rows if not row["held"]} == {"memory hog", "CPU hog", "full disk"}
    assert all("run the trainer as root" in row["advice"] for row in rows if not row["held"])
    assert doctor.returncode == 1
    assert list((home / f"polar-trl-{as_user.UID}").iterdir()) == []


def test_what_a_killed_user_left_is_gone_at_the_next_start(home: Path) -> None:
    with as_user.start(SCRIPT.read_text(), "doomed", home=home) as script:
        wait_until(lambda: bool(list(home.glob("state/doomed*/disk/work/started"))))
        script.kill()
    (left,) = home.glob("state/*")
    wait_until(lambda: not list_processes(str(home)))
    assert left.exists()
    assert report_of("bwrap", home=home)["left"] == []


@pytest.mark.parametrize(
    ("asked", "name"),
    [(Limits(memory_mb=100), "memory_mb"), (Limits(disk_mb=100), "disk_mb"), (Limits(pids=9), "pids")],
)
def test_a_limit_that_cannot_be_had_is_refused(asked: Limits, name: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox_{name} is .*'local' sandbox cannot enforce it"):
        build_backend("local", limits=asked)


@pytest.fixture
def engine() -> Path:
    return Path(os.environ["DOCKER_HOST"].removeprefix("unix://"))


@pytest.fixture
def bare_image() -> Iterator[str]:
    """Build the tests' image without Python."""
    client, name = docker.from_env(), "polar-trl-test:bare"
    container = client.containers.run(IMAGE, ["rm", "/usr/bin/python3"], network_mode="none", detach=True)
    try:
        assert container.wait()["StatusCode"] == 0
        container.commit(*name.split(":"))
        yield name
    finally:
        container.remove(force=True)
        client.images.remove(name)


def test_docker(home: Path, engine: Path) -> None:
    report = report_of("docker", home=home, engine=engine)
    assert report["capabilities"] == {
        "cuts_network": True,
        "limits_memory": True,
        "limits_disk": False,
        "uses_images": True,
    }
    assert (report["hog"][0], report["out_of_memory"]) == (137, True)
    require_a_sandbox(report)


def test_docker_where_only_an_agent_brings_node(home: Path, engine: Path, bare_image: str) -> None:
    assert NODE.find_version() == NODE.version, "run scripts/dev/get_agents.py first (scripts/test.sh does)"
    shutil.copytree(NODE.folder, home / "cache" / "agents" / NODE.folder.name, symlinks=True)
    for folder in (home / "cache", home / "cache" / "agents"):
        os.chown(folder, as_user.UID, as_user.UID)
    report = report_of("node", bare_image, home=home, engine=engine)
    answer = [0, "hi there\n", False]
    assert report == {"model": answer, "late": [None, "", True], "again": answer, "left": []}


def test_docker_where_no_relay_runs(home: Path, engine: Path, bare_image: str) -> None:
    report = report_of("node", bare_image, home=home, engine=engine)
    assert "it has neither python3 nor node. Add one of them to the image" in report["refusal"]
    assert report["left"] == []
    containers = docker.from_env().containers.list(all=True, filters={"ancestor": bare_image}, ignore_removed=True)
    assert [container.name for container in containers if container.labels.get(OWNER_LABEL)] == []


def test_podman_as_root(tmp_path: Path) -> None:
    with podman.serve() as engine:
        environment = {**os.environ, "HOME": str(tmp_path), "DOCKER_HOST": f"unix://{engine}"}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "docker"], env=environment, stdout=subprocess.PIPE, timeout=240, check=True
        )
    report = json.loads(done.stdout)
    assert report["capabilities"] == {
        "cuts_network": True,
        "limits_memory": True,
        "limits_disk": True,
        "uses_images": True,
    }
    assert (report["hog"][0], report["out_of_memory"]) == (137, True)
    require_a_sandbox(report, uid=0)


def test_podman_of_a_user(home: Path) -> None:
    with podman.serve(as_user.UID) as engine:
        report = report_of("docker", home=home, engine=engine)
    limits = report["capabilities"].pop("limits_memory")  # where systemd delegates control groups
    assert report["capabilities"] == {"cuts_network": True, "limits_disk": False, "uses_images": True}
    assert report["out_of_memory"] == limits
    require_a_sandbox(report, name_inside=0, limits_pids=limits)


def test_limits_that_a_users_engine_ignores_are_refused() -> None:
    capabilities = Capabilities(cuts_network=True, limits_memory=False, limits_disk=False, uses_images=True)
    for asked in (Limits(memory_mb=100), Limits(cpus=1.0), Limits(pids=9)):
        with pytest.raises(ConfigError, match="'docker' sandbox cannot enforce it for this user here"):
            _require_limits("docker", capabilities, asked)


@contextmanager
def find_cache_of_agents(home: Path) -> Iterator[None]:
    """Show the agents that root has installed in a user's cache."""
    assert NODE.find_version() == NODE.version, "run scripts/dev/get_agents.py first (scripts/test.sh does)"
    agents = home / "cache" / "agents"
    agents.mkdir(parents=True)
    os.chown(agents.parent, as_user.UID, as_user.UID)
    subprocess.run(["mount", "--bind", NODE.folder.parent, agents], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", agents], check=True)


def require_a_sandbox(
    report: dict[str, Any], *, uid: int = as_user.UID, name_inside: int | None = None, limits_pids: bool = True
) -> None:
    assert report["uid"] == uid
    inside = uid if name_inside is None else name_inside
    assert report["basics"] == [3, f"/workspace\nhello\nold\n/home/agent 1\n{inside}\n", False]
    assert report["privilege"] == [0, "CapEff:\t0000000000000000\nNoNewPrivs:\t1\nno\n", False]
    assert report["files"] == [0, "", False]
    assert report["got"] == [[0, 255], True, "new\n"]
    assert report["tree"] == "old\n"
    assert report["deadline"] == [None, "started\n", True]
    assert report["daemon"] == [0, "", False] and report["daemon_is_dead"]
    assert report["killed"][0] in (None, 137) and not report["killed"][2]
    assert report["bomb"][0] == 0 and int(report["bomb"][1]) >= (200 - 64 if limits_pids else 0)
    assert report["again"] == [0, "again\n", False]
    assert report["origin"] == [0, "http://127.0.0.1:8080\n", False]
    assert report["model"] == [0, "hi there\n", False]
    assert report["late"] == [None, "hi there\n", True]
    if uid != 0:  # as root, what a deadline restarted has another network, and the agent is over
        assert report["model_after_the_deadline"] == [0, "hi there\n", False]
    assert "refused" in report["other_port"][1] and "unreachable" in report["away"][1]
    assert any(how in report["gone"][1] for how in ("refused", "reset", "Broken pipe", "closed"))
    assert (report["left"], report["children"]) == ([], [])
