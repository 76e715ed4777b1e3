"""Sessions of one run are apart: what one removes or kills costs no other its reward, in the default and in `local`.

A folder that is harmed from outside of all sandboxes is no agent's doing, and gives no reward.
"""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import Sessions, build

from polar_trl.rollout.runner import RolloutResult
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task

both_kinds = pytest.mark.parametrize("kind", ["bwrap", "local"])
WORK = "echo fine > result; python3 ~/ask.py"


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    with Sessions(tmp_path / "state") as sessions:
        yield sessions
    assert list(sessions.root.iterdir()) == []


def read_result(task: Task, box: Sandbox) -> bool:
    return box.run("grep -qx fine result", env={}, timeout_s=60).exit_code == 0


def find_folder(sessions: Sessions, name: str) -> Path:
    (folder,) = sessions.root.glob(f"{sessions.name_session(name)}-*")
    return folder


HARMFUL = {
    "scratch": "rm -rf /tmp/* /var/tmp/* /dev/shm/*",
    "state": "rm -rf {root}/*; rm -rf {root}",
    "find": "find {root} /tmp /var/tmp -name result -delete; find / -xdev -maxdepth 6 -name result -delete",
    "home": "rm -rf ~ /var/tmp ~/../../*",
    "rights": "chmod -R 000 /tmp /var/tmp {root}; chmod 000 ~ .",
    "rename": "mv {root} {root}-gone; mv /tmp/* /var/tmp; ln -s /etc {root}",
    "kill": "pkill -9 python; pkill -9 bash -u 0 -n; kill -9 -1; killall5 -9; fuser -k {root}",
}


@both_kinds
@pytest.mark.parametrize("harm", HARMFUL)
def test_what_one_session_does_costs_no_other_its_reward(
    sessions: Sessions, tmp_path: Path, kind: str, harm: str
) -> None:
    backend, wiped = build(kind, sessions.root), threading.Event()

    def grade_late(task: Task, box: Sandbox) -> bool:
        assert wiped.wait(120)
        return read_result(task, box)

    busy = "until [ -e ~/go ]; do sleep 0.05; done; python3 ~/ask.py"
    at_work = sessions.start(backend, {"at_work": f"{WORK}; {busy}"}, read_result)
    graded = sessions.start(backend, {"graded": WORK}, grade_late)
    sessions.wait_until_asked(2)
    # were it not apart, this machine's own /tmp would be next
    guard = f"[ -e {tmp_path}/outside ] && exit 9"
    (tmp_path / "outside").touch()
    command = HARMFUL[harm].format(root=sessions.root)
    wiper = sessions.start(backend, {"wiper": f"{WORK}; {guard}; cd /; {command}"}).result(timeout=600)["wiper"]
    wiped.set()
    (find_folder(sessions, "at_work") / "disk" / "home" / "go").touch()
    for future in (at_work, graded):
        (finished,) = future.result(timeout=600).values()
        assert (finished.rollout.stop_reason, finished.rollout.reward) == ("completed", 1.0), finished.rollout.error
    assert wiper.rollout.error is None and wiper.rollout.reward == 1.0  # graded, whatever it did to itself
    assert (tmp_path / "outside").exists()


@both_kinds
@pytest.mark.parametrize(
    "command", ['rm -rf "$PWD" ~ /tmp', "rm -rf result; chmod 000 .", "rm result; mkdir result", "rm -rf {root}/*"]
)
def test_what_an_agent_does_to_its_own_folder_is_graded(sessions: Sessions, kind: str, command: str) -> None:
    script = f"{WORK}; {command.format(root=sessions.root)}; true"
    (finished,) = sessions.start(build(kind, sessions.root), {"a": script}, read_result).result(timeout=600).values()
    expected = 1.0 if "{root}" in command and kind == "bwrap" else 0.0
    assert (finished.rollout.reward, finished.rollout.error) == (expected, None)


def remove(folder: Path) -> None:
    subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)  # mount points stay


def empty(folder: Path) -> None:
    subprocess.run(f"rm -rf {folder}/*", shell=True, stderr=subprocess.DEVNULL)


def replace(folder: Path) -> None:
    aside = folder.with_name("aside")
    folder.rename(aside)
    shutil.copytree(aside, folder, ignore=shutil.ignore_patterns("disk.img", "pts"))


def take_rights(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "000", folder])


def remove_files(folder: Path) -> None:
    subprocess.run(["find", folder, "-type", "f", "-delete"])


def require_no_reward(finished: RolloutResult, folder: Path) -> None:
    rollout = finished.rollout
    assert (rollout.reward, rollout.error_kind, len(rollout.calls)) == (None, "sandbox_failed", 1)
    assert rollout.error is not None and str(folder) in rollout.error
    assert rollout.error.startswith("SandboxError: somebody outside of the sandbox ") and "\n" not in rollout.error


@both_kinds
@pytest.mark.parametrize("harm", [remove, empty, replace, take_rights, remove_files])
def test_a_folder_that_is_harmed_while_it_is_graded_gives_no_reward(
    sessions: Sessions, kind: str, harm: Callable[[Path], None]
) -> None:
    folders = {}

    def grade(task: Task, box: Sandbox) -> bool:
        if task.id == "victim":
            folders["victim"] = find_folder(sessions, "victim")
            harm(folders["victim"])
        return box.get("result") == b"fine\n"

    scripts = {"victim": WORK, "other": WORK}
    results = sessions.start(build(kind, sessions.root), scripts, grade).result(timeout=600)
    require_no_reward(results["victim"], folders["victim"])
    assert results["other"].rollout.reward == 1.0
    if (aside := sessions.root / "aside").exists():
        for place in ("disk", "pts"):
            subprocess.run(["umount", "-R", "-l", aside / place], stderr=subprocess.DEVNULL)
        shutil.rmtree(aside)


@both_kinds
def test_a_folder_that_is_removed_while_its_agent_works_gives_no_reward(sessions: Sessions, kind: str) -> None:
    script = f"{WORK}; while [ -e result ]; do sleep 0.05; done"
    running = sessions.start(build(kind, sessions.root), {"victim": script}, read_result)
    sessions.wait_until_asked(1)
    folder = find_folder(sessions, "victim")
    remove(folder)
    require_no_reward(running.result(timeout=600)["victim"], folder)
