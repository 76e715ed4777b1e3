"""`polar-trl clean`: what a killed trainer left is gone, and what a live one has is not touched."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from faults import Leftovers, list_processes
from serving import wait_until

from polar_trl.cli import main
from polar_trl.sandbox import build_backend, local
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.owner import build_helper_mark, build_owner_tag, find_state_folder
from polar_trl.types import Task

TRAINER = Path(__file__).parents[1] / "helpers" / "doomed_trainer.py"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder, which is the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return find_state_folder()


def run_clean(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["clean", "--json"]) == 0
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    return report


@contextmanager
def trainer(state: Path, token: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """One that runs commands in a bubblewrap sandbox and in a container, and its owner tag. Killed at the end."""
    command = [sys.executable, str(TRAINER), str(state), token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            owner = process.stdout.readline().strip()
            assert process.stdout.readline() == "running\n"
            yield process, owner
        finally:
            process.kill()


@pytest.mark.containers
def test_it_removes_what_the_dead_left_and_only_that(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(state, "tokendead") as (_, owner):
        live = Leftovers(state, "tokendead", docker.from_env(), owner)
        before = live.find()
        kinds = {"containers", "folders", "mounts", "disks", "cgroups", "processes"}
        assert before.keys() == kinds, "nothing is there that could be removed"
        report = run_clean(capsys)
        assert (report["containers"], report["folders"], report["cgroups"]) == ([], [], [])
        assert (report["live_sessions"], report["engine"]) == (2, "")
        assert {kind: names for kind, names in live.find().items() if kind != "processes"} == {
            kind: names for kind, names in before.items() if kind != "processes"
        }
    report = run_clean(capsys)
    assert sorted(report["folders"]) == sorted(before["folders"])  # type: ignore[call-overload]
    assert report["containers"] == before["containers"]
    assert len(report["cgroups"]) == 1 and report["live_sessions"] == 0  # type: ignore[arg-type]
    wait_until(lambda: not live.find())


@pytest.mark.containers
def test_what_forked_processes_hold_open_is_ended_too(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data loader's workers hold the pipe at whose end a sandbox's helper waits."""
    script = (
        "import os, sys, time; from pathlib import Path; "
        "from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend; from polar_trl.types import Task; "
        f"box = BwrapSandboxBackend(root=Path({str(state)!r})).create(Task(id='t', instruction='x'), 'tokenfork'); "
        "worker = os.fork(); worker or time.sleep(600); print(worker, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = process.stdout.readline().strip()
        (folder,) = state.glob("tokenfork*")
        process.kill()
        process.wait()
        assert list_processes(build_helper_mark(folder)) != []
        assert run_clean(capsys)["folders"] == [folder.name]
        wait_until(lambda: not list_processes(build_helper_mark(folder)))
        subprocess.run(["kill", "-9", worker], check=True)


def test_no_engine_is_no_error(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    sandbox = LocalSandboxBackend().create(Task(id="t", instruction="x"), "s")
    assert main(["clean"]) == 0
    printed = capsys.readouterr().out
    assert "nothing was left behind\n1 sessions of live runs were left alone\n" in printed
    assert "no containers were looked for: no container engine answers at unix://" in printed
    sandbox.destroy()


def test_a_folder_of_a_dead_process_goes_whatever_is_in_it(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from polar_trl.sandbox.local import LocalSandboxBackend; from polar_trl.types import Task\n"
            f"from pathlib import Path; b = LocalSandboxBackend(Path({str(state)!r}))\n"
            "s = b.create(Task(id='t', instruction='x'), 's'); s.run('mkdir -p a/b; chmod 0 a', env={}, timeout_s=9)\n"
            "import os; os._exit(0)",
        ]
    ) as process:
        process.wait()
    (left,) = state.iterdir()
    assert run_clean(capsys)["folders"] == [left.name]
    assert list(state.iterdir()) == []


FORGE = r"""
for place in . .. ../.. $HOME/.. $HOME/../.. {state} {state}/*; do
  for name in owner helper; do
    [ -p "$place/$name" ] || echo "{helper}" > "$place/$name"
  done
  [ -p "$place/owner" ] || echo "{dead}" > "$place/owner"
  rm -f "$place/owner" && mkfifo "$place/owner"
done
"""


@pytest.mark.parametrize("kind", ["bwrap", "local", "local without namespaces"])
def test_an_agent_has_nobody_ended(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It writes what bookkeeping it can reach: the trainer, here this process, as the helper of a dead session."""
    monkeypatch.setattr(local, "can_enclose", lambda: kind == "local")
    backend = build_backend(kind.partition(" ")[0])
    bystander = subprocess.Popen(["sleep", "600"])
    boxes = [backend.create(Task(id="t", instruction="x"), name) for name in ("forger", "other")]
    dead = build_owner_tag(bystander.pid).rsplit(":", 1)[0] + ":1"
    script = FORGE.format(state=state, helper=build_owner_tag(bystander.pid), dead=dead)
    try:
        boxes[0].run(script, env={}, timeout_s=60)
        report = run_clean(capsys)
        assert bystander.poll() is None
        if kind != "local without namespaces":  # there it can reach them, and remove the folders itself
            assert (report["folders"], report["live_sessions"]) == ([], 2)
            for box in boxes:
                box.require_whole()
    finally:
        bystander.kill()
        bystander.wait()
        for box in boxes:
            box.destroy()


def test_the_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["clean", "--help"])
    assert "polar-trl clean --json" in capsys.readouterr().out
