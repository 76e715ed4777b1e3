"""The local sandbox against hostile agents: /proc, leftovers, floods, links and locked folders."""

import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox import local
from polar_trl.sandbox.local import LocalSandbox, LocalSandboxBackend
from polar_trl.types import Task

TAIL = 64 * 1024


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[LocalSandbox]:
    task = Task(id="t", instruction="x", files={"in/data.txt": "héllo\n"}, env={"FROM_TASK": "1", "BOTH": "task"})
    made = LocalSandboxBackend(tmp_path).create(task, "s/1")
    yield made
    made.destroy()


def run(sandbox: LocalSandbox, command: str, timeout_s: float = 60.0, **env: str) -> str:
    result = sandbox.run(command, env=env, timeout_s=timeout_s)
    assert (result.exit_code, result.timed_out) == (0, False), result
    return result.stdout


def find_processes(sandbox_folder: str) -> list[int]:
    """Find processes whose current folder is inside a sandbox."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                folder = os.readlink(entry / "cwd")
            except OSError:
                continue
            if folder.startswith(sandbox_folder):
                found.append(int(entry.name))
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition; without it, pytest's own timeout fails the test."""
    while not is_true():
        time.sleep(0.01)


def test_environment_is_minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("EXTRA", "given")
    task = Task(id="t", instruction="x", env={"FROM_TASK": "1", "BOTH": "task", "HOME": "/nowhere"})
    sandbox = LocalSandboxBackend(tmp_path, inherit_env=("PATH", "LANG", "EXTRA", "UNSET")).create(task, "s")
    lines = run(sandbox, "env -0", BOTH="run", FROM_RUN="ü").split("\0")
    env = dict(line.split("=", 1) for line in lines if line)
    base = Path(sandbox.workdir).parent
    sandbox.destroy()
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):  # bash's own
        env.pop(name, None)
    assert env == {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "EXTRA": "given",
        "FROM_TASK": "1",
        "BOTH": "run",
        "FROM_RUN": "ü",
        "HOME": f"{base}/home",
        "TMPDIR": "/tmp",
    }


@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("exit 41", 41), ("kill -9 $$", 137), ("nope", 127)])
def test_exit_codes(sandbox: LocalSandbox, command: str, code: int) -> None:
    result = sandbox.run(command, env={}, timeout_s=60)
    assert (result.exit_code, result.timed_out) == (code, False)


def test_stdin_is_empty(sandbox: LocalSandbox) -> None:
    assert run(sandbox, "cat; echo end") == "end\n"


def test_command_bytes_arrive_as_they_are(sandbox: LocalSandbox) -> None:
    text = "a'b\"c $(echo no) `echo no` \\n \n\tümläut 🎉 -x"
    assert run(sandbox, "printf %s \"$TEXT\"; cat <<'E'\n" + text + "\nE", TEXT=text) == f"{text}{text}\n"


NAP = f"sleep {100_000 + os.getpid()}"
DAEMONS = {
    "background": f"{NAP} & disown",
    "holds_no_output": f"{NAP} </dev/null >/dev/null 2>&1 & disown",
    "setsid": f"setsid {NAP} </dev/null >/dev/null 2>&1 & disown",
    "double_fork": f"(setsid bash -c '(trap \"\" TERM HUP INT; {NAP}; {NAP}) & exit' &) </dev/null",
    "cleared_environment": f"env -i setsid $(command -v bash) -c '/bin/{NAP} & exit' >/dev/null 2>&1 & disown",
    "stopped": f"{NAP} & sleep 0.2; kill -STOP $!",
}


@pytest.mark.parametrize(
    ("kind", "ends_by"), [*((kind, "exit") for kind in DAEMONS), ("double_fork", "deadline"), ("stopped", "deadline")]
)
def test_daemons_are_gone(sandbox: LocalSandbox, kind: str, ends_by: str) -> None:
    # it waits until the daemon is there, so that the test cannot pass by being early
    command = f"{DAEMONS[kind]}\nuntil pgrep -f '^(/bin/)?{NAP}' >/dev/null; do sleep 0.02; done; echo up"
    command += "; sleep 1000" if ends_by == "deadline" else ""
    result = sandbox.run(command, env={}, timeout_s=6 if ends_by == "deadline" else 60)
    assert (result.stdout, result.timed_out) == ("up\n", ends_by == "deadline")
    assert find_processes(str(Path(sandbox.workdir).parent)) == []


def test_processes_that_fork_away_all_the_time_are_gone(sandbox: LocalSandbox) -> None:
    # each hands over to a child and exits: never more than eight at once, and never long under one process id
    hopper = textwrap.dedent("""
        import os, time
        end = time.monotonic() + 60
        for _ in range(7):
            if os.fork() == 0:
                break
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
    """)
    sandbox.put("hopper.py", hopper.encode())
    result = sandbox.run(f"{sys.executable} -I -S hopper.py & sleep 0.5; echo up", env={}, timeout_s=60)
    assert result.stdout == "up\n"
    assert find_processes(str(Path(sandbox.workdir).parent)) == []


def test_kill_with_nothing_running_does_nothing(sandbox: LocalSandbox) -> None:
    sandbox.kill()
    assert run(sandbox, "echo fine") == "fine\n"


def test_a_killed_run_keeps_its_output_and_spoils_nothing(sandbox: LocalSandbox) -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(sandbox.run("echo up; touch up; sleep 1000", env={}, timeout_s=600))
    )
    thread.start()
    wait_until(lambda: sandbox.get("up") is not None)
    sandbox.kill()
    thread.join()
    assert (results[0].exit_code, results[0].timed_out, results[0].stdout) == (None, False, "up\n")
    assert run(sandbox, "echo again") == "again\n"  # what is left is still graded


def test_a_model_that_kills_everything_kills_its_own_session(sandbox: LocalSandbox) -> None:
    assert run(sandbox, "echo $PPID") == "1\n", "without a process namespace the next line would end this test run"
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        result = sandbox.run(
            "sleep 1000 & kill -9 -1; kill -9 $PPID; pkill -9 .; killall5 -9; echo alive", env={}, timeout_s=60
        )
        assert result.stdout in ("alive\n", "")  # pkill may take the shell along
        assert find_processes(str(Path(sandbox.workdir).parent)) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert run(sandbox, "ls /proc | grep -c '^[0-9]*$'") in ("3\n", "4\n")  # init, bash, ls, grep: nobody else's


def test_a_model_that_removes_everything_removes_its_own_files(tmp_path: Path) -> None:
    outside = Path.home() / f".polar-trl-test-{os.getpid()}"
    shared = Path("/dev/shm", outside.name)
    for path, text in ((outside, "precious"), (shared, "kept")):
        path.write_text(text)
    scratch = tmp_path / "scratch"
    sandbox = LocalSandboxBackend(tmp_path / "state").create(Task(id="t", instruction="x", files={"a": "x"}), "s")
    try:
        command = (
            f"rm -f a {outside}; echo spoiled > {outside}; rm -f /dev/null; echo x > /dev/null; "
            f"touch /usr/planted /etc/planted; echo y > {scratch}; rm -rf /tmp/* /var/tmp/* /dev/shm/*; "
            "echo z > b; echo v > $HOME/c; echo w > $TMPDIR/d"
        )
        result = sandbox.run(command, env={}, timeout_s=60)
        assert result.exit_code == 0
        assert (
            result.stderr.count("Read-only file system") >= 7
        )  # two are its own mount points, shown folders are more
        assert outside.read_text() == "precious"
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        assert sandbox.get("a") is None and sandbox.get("b") == b"z\n"
        assert not scratch.exists() and shared.read_text() == "kept"
    finally:
        outside.unlink()
        shared.unlink()
        sandbox.destroy()


@pytest.fixture
def plain_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSandbox]:
    """Make a sandbox as on a machine that forbids namespaces."""
    monkeypatch.setattr(local, "can_enclose", lambda: False)
    made = LocalSandboxBackend(tmp_path / "state").create(Task(id="t", instruction="x"), "s")
    yield made
    made.destroy()


def test_without_namespaces_an_agent_that_kills_its_supervisor_does_not_hang_the_trainer(
    plain_sandbox: LocalSandbox,
) -> None:
    # TERM is what `kill` sends, and is answered by killing everything
    result = plain_sandbox.run("setsid sleep 1000 & kill $PPID; sleep 1000", env={}, timeout_s=60)
    assert (result.exit_code, result.timed_out) == (None, False)
    assert find_processes(str(Path(plain_sandbox.workdir).parent)) == []
    result = plain_sandbox.run("kill -9 $PPID", env={}, timeout_s=60)
    assert (result.exit_code, result.timed_out) == (None, False)


@pytest.mark.parametrize("ends_by", ["exit", "deadline"])
def test_without_namespaces_daemons_are_gone(plain_sandbox: LocalSandbox, ends_by: str) -> None:
    command = f"{DAEMONS['double_fork']}\nuntil pgrep -f '^(/bin/)?{NAP}' >/dev/null; do sleep 0.02; done; echo up"
    command += "; sleep 1000" if ends_by == "deadline" else ""
    result = plain_sandbox.run(command, env={}, timeout_s=6 if ends_by == "deadline" else 60)
    assert (result.stdout, result.timed_out) == ("up\n", ends_by == "deadline")
    assert find_processes(str(Path(plain_sandbox.workdir).parent)) == []


def test_a_flood_on_both_streams_keeps_the_tail_of_each(sandbox: LocalSandbox) -> None:
    # bounded by itself, so that a broken sandbox costs the machine nothing
    flood = "head -c 2000000 /dev/zero | tr '\\0' {0}"
    command = f"{flood.format('o')} & {flood.format('e')} >&2 & wait; echo end"
    result = sandbox.run(command, env={}, timeout_s=60)
    assert result.exit_code == 0
    assert result.stdout == "o" * (TAIL - 4) + "end\n"
    assert result.stderr == "e" * TAIL


def test_large_interleaved_streams_stay_apart(sandbox: LocalSandbox) -> None:
    command = "for i in $(seq 3000); do printf '%07d\\n' $i; printf '%07d\\n' $((i + 5000)) >&2; done"
    result = sandbox.run(command, env={}, timeout_s=60)
    assert result.stdout == "".join(f"{i:07d}\n" for i in range(1, 3001))
    assert result.stderr == "".join(f"{i + 5000:07d}\n" for i in range(1, 3001))


def test_undecodable_output_is_replaced(sandbox: LocalSandbox) -> None:
    assert run(sandbox, r"printf 'a\xffb'") == "a\ufffdb"


@pytest.mark.parametrize(
    ("command", "env", "word"),
    [
        ("echo \0", {}, "NUL"),
        ("true", {"A": "x\0y"}, "null byte"),
        ("echo \ud800", {}, "surrogate"),
        ("true", {"A": "x" * (1 << 20)}, "Argument list too long"),
    ],
)
def test_commands_that_cannot_be_started_are_refused(
    sandbox: LocalSandbox, command: str, env: dict[str, str], word: str
) -> None:
    with pytest.raises(SandboxError, match=word):
        sandbox.run(command, env=env, timeout_s=60)


def test_a_command_too_long_for_the_shell_is_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(SandboxError, match="bash could not be started: Argument list too long"):
        sandbox.run("#" + "x" * (1 << 20), env={}, timeout_s=60)


def test_links_lead_nowhere_outside(sandbox: LocalSandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    run(
        sandbox,
        f"ln -s {outside}/secret file; ln -s {outside} folder; ln -s ../../outside relative; ln -s loop loop; "
        "echo inner > real; ln -s real inner; ln -s ~ house",
    )
    for path in ("file", "folder/secret", "relative/secret", "loop", "loop/x"):
        assert sandbox.get(path) is None
    assert sandbox.get("inner") == b"inner\n"
    for path in ("folder/new", "relative/new"):
        with pytest.raises(SandboxError, match="through a link"):
            sandbox.put(path, b"x")
    sandbox.put("file", b"mine")  # replaces the link
    assert sandbox.get("file") == b"mine"
    sandbox.put("house/note", b"home")
    assert sandbox.get("~/note") == b"home"
    assert [(p.name, p.read_text()) for p in outside.iterdir()] == [("secret", "secret")]


def test_special_files_are_no_files_and_never_block(sandbox: LocalSandbox) -> None:
    run(sandbox, "mkfifo fifo; mkfifo answer; ln -s /dev/zero zero; ln -s fifo link; mkdir full; touch full/x")
    for path in ("fifo", "zero", "link"):
        assert sandbox.get(path) is None
    sandbox.put("answer", b"42")
    assert sandbox.get("answer") == b"42"
    with pytest.raises(SandboxError, match="full"):
        sandbox.put("full", b"x")
    assert run(sandbox, "ls -A full; find . -name '.polar*'") == "x\n"


def test_hard_links_and_read_only_files_are_replaced(sandbox: LocalSandbox, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    os.link(tmp_path / "other", f"{sandbox.workdir}/hard")
    run(sandbox, "echo old > closed; chmod 000 closed")
    for path in ("hard", "closed"):
        sandbox.put(path, b"new")
        assert sandbox.get(path) == b"new"
    assert (tmp_path / "other").read_text() == "other"


def test_destroy_removes_what_the_agent_locked(tmp_path: Path) -> None:
    sandbox = LocalSandboxBackend(tmp_path).create(Task(id="t", instruction="x"), "s")
    (tmp_path / "outside").mkdir(mode=0o755)
    # deeper than Python's recursion goes
    nest = f'{sys.executable} -I -S -c \'import os\nfor _ in range(1200): os.mkdir("d"); os.chdir("d")\''
    run(sandbox, f"ln -s {tmp_path}/outside out; mkdir -p a/b; touch a/b/c; {nest}; chmod 000 a/b a ~ .")
    sandbox.destroy()
    sandbox.destroy()
    assert [p.name for p in tmp_path.iterdir()] == ["outside"]
    assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == 0o755
    with pytest.raises(SandboxError, match="destroyed"):
        sandbox.run("true", env={}, timeout_s=60)
    with pytest.raises(SandboxError, match="destroyed"):
        sandbox.get("a")


def test_an_agent_that_removes_its_folder_is_still_graded(sandbox: LocalSandbox) -> None:
    sandbox.run('rm -rf "$PWD" ~', env={}, timeout_s=60)
    assert sandbox.get("in/data.txt") is None
    assert run(sandbox, "pwd") == f"{sandbox.workdir}\n"


def test_create_refuses_images_and_leaves_nothing_after_a_failure(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path / "made")
    with pytest.raises(SandboxError, match="the local sandbox has no images, and this task names 'img:1'"):
        backend.create(Task(id="t", instruction="x", image="img:1"), "s")
    with pytest.raises(SandboxError, match="leads outside"):
        backend.create(Task(id="t", instruction="x", files={"../escape": "x"}), "s")
    assert list((tmp_path / "made").iterdir()) == []


def test_sandboxes_of_one_session_id_are_apart(tmp_path: Path) -> None:
    backend = LocalSandboxBackend(tmp_path)
    one, two = (backend.create(Task(id="t", instruction="x"), "../same") for _ in range(2))
    one.put("f", b"1")
    assert two.get("f") is None
    assert {p.parents[1] for p in map(Path, (one.workdir, two.workdir))} == set(tmp_path.iterdir())
    one.destroy()
    two.destroy()
