"""The local sandbox: deadlines, nothing left behind, and files that an agent cannot use against the trainer."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import kill_when_up, wait_until

from polar_trl.errors import SandboxError
from polar_trl.sandbox.local import LocalSandbox, LocalSandboxBackend
from polar_trl.types import Task


@pytest.fixture()
def sandbox(tmp_path: Path) -> Iterator[LocalSandbox]:
    task = Task(id="t", instruction="x", files={"in/put.txt": "héllo\n"}, env={"COLOUR": "blue"})
    sandbox = LocalSandboxBackend(tmp_path).create(task, "session/1")
    yield sandbox
    sandbox.destroy()


def run(sandbox: LocalSandbox, command: str, timeout_s: float = 20.0) -> object:
    return sandbox.run(command, env={}, timeout_s=timeout_s)


def is_running(mark: str) -> bool:
    """Return whether any process has `mark` on its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def wait_until_gone(mark: str) -> None:
    wait_until(lambda: not is_running(mark))


def test_a_command_sees_its_files_and_a_small_environment(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(sandbox, "cat in/put.txt; echo $COLOUR; pwd; echo $HOME; env | grep -c SECRET; echo oops >&2; exit 3")
    lines = result.stdout.splitlines()
    assert lines[:3] == ["héllo", "blue", sandbox.workdir]
    assert lines[3].endswith("/home")
    assert lines[4] == "0"
    assert (result.exit_code, result.stderr, result.timed_out) == (3, "oops\n", False)


def test_secrets_of_the_trainer_stay_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    sandbox = LocalSandboxBackend(tmp_path).create(Task(id="t", instruction="x"), "s")
    assert "hidden" not in run(sandbox, "env").stdout
    sandbox.destroy()


def test_the_deadline_ends_everything(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "echo started; sleep 87.125 & sleep 87.125", timeout_s=3)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "started\n")
    wait_until_gone("87.125")


@pytest.mark.parametrize(
    "escape",
    [
        "setsid sleep 88.{n} >/dev/null 2>&1 &",
        "(setsid bash -c 'sleep 88.{n} & disown' >/dev/null 2>&1 &)",
        "env -i setsid sleep 88.{n} >/dev/null 2>&1 &",
        "nohup sleep 88.{n} >/dev/null 2>&1 &",
    ],
)
def test_a_daemon_does_not_outlive_the_command(sandbox: LocalSandbox, escape: str) -> None:
    number = sum(escape.encode())
    result = run(sandbox, escape.format(n=number) + "\nsleep 0.2")
    assert result.exit_code == 0
    wait_until_gone(f"88.{number}")


def test_kill_from_another_thread(sandbox: LocalSandbox) -> None:
    kill_when_up(sandbox)
    result = run(sandbox, "touch up; sleep 89.25")
    assert result.exit_code is None
    assert not result.timed_out
    wait_until_gone("89.25")


def test_a_flood_keeps_its_end(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "head -c 3000000 /dev/zero | tr '\\0' a; echo; echo end; head -c 100000 /dev/zero >&2")
    assert result.stdout.endswith("a\nend\n")
    assert len(result.stdout) <= 64 * 1024
    assert len(result.stderr) <= 64 * 1024


def test_put_and_get(sandbox: LocalSandbox) -> None:
    sandbox.put("a/b.bin", b"\0\xff")
    sandbox.put("~/.config/x.toml", b"k=1")
    assert sandbox.get("a/b.bin") == b"\0\xff"
    assert run(sandbox, "cat ~/.config/x.toml").stdout == "k=1"
    assert sandbox.get("missing") is None
    assert sandbox.get("a") is None
    with pytest.raises(SandboxError, match="larger than 1 bytes"):
        sandbox.get("a/b.bin", max_bytes=1)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out", "~/../out", ""])
def test_paths_that_lead_outside_are_refused(sandbox: LocalSandbox, path: str) -> None:
    with pytest.raises(SandboxError):
        sandbox.put(path, b"x")
    with pytest.raises(SandboxError):
        sandbox.get(path)


def test_planted_links_and_pipes_do_no_harm(sandbox: LocalSandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    run(sandbox, f"ln -s {outside} folder; ln -s {outside}/secret link; mkfifo pipe; ln -s in/put.txt good")
    assert sandbox.get("link") is None
    assert sandbox.get("folder/secret") is None
    assert sandbox.get("pipe") is None
    assert sandbox.get("good") == "héllo\n".encode()
    with pytest.raises(SandboxError):
        sandbox.put("folder/new", b"x")
    sandbox.put("link", b"mine")
    assert (outside / "secret").read_text() == "s"
    assert sorted(p.name for p in outside.iterdir()) == ["secret"]


def test_destroy_removes_what_the_agent_locked(tmp_path: Path) -> None:
    sandbox = LocalSandboxBackend(tmp_path).create(Task(id="t", instruction="x"), "s")
    run(sandbox, "mkdir -p deep/er && touch deep/er/f && chmod 000 deep/er deep")
    sandbox.destroy()
    sandbox.destroy()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SandboxError, match="destroyed"):
        run(sandbox, "true")


def test_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no images"):
        LocalSandboxBackend(tmp_path).create(Task(id="t", instruction="x", image="python:3.12"), "s")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_trainer_takes_its_agents_along(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from polar_trl.sandbox.local import LocalSandboxBackend; "
        "from polar_trl.types import Task; "
        "s = LocalSandboxBackend(Path(sys.argv[1])).create(Task(id='t', instruction='x'), 's'); "
        "s.run('echo up > started; sleep 90.375', env={}, timeout_s=100)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    wait_until(lambda: any(tmp_path.glob("*/disk/work/started")))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until_gone("90.375")
