"""A warm Python of the tests runs what `python` would: words, folder, environment, streams, signals, exit status."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launch import find_warm_python
from serving import wait_until

WAIT = "import os, pathlib, time; pathlib.Path('up').write_text(str(os.getpid())); time.sleep(600)"


def test_it_runs_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "script.py").write_text(
        "import os, sys, tempfile, beside\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['WORD'], tempfile.gettempdir(), beside.WORD, sys.stdin.read())\n"
        "print('said', file=sys.stderr)\n"
        "sys.exit(3 if 'torch' in sys.modules else 4)\n"
    )
    command = [find_warm_python(), str(tmp_path / "script.py"), "a b", "-c"]
    done = subprocess.run(
        command,
        input="in",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"WORD": "w", "TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]},
    )
    assert done.stdout == f"['a b', '-c'] {tmp_path} w {tmp_path} beside in\n"
    assert (done.stderr, done.returncode) == ("said\n", 3)


def test_modules_and_code(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for words in (["-m", "there", "x"], ["-c", "import there, sys; print(sys.argv)", "x"]):
        done = subprocess.run([find_warm_python(), *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == ("__main__ ['x']\n" if words[0] == "-m" else "there ['x']\n['-c', 'x']\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([find_warm_python(), "-c", WAIT], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (tmp_path / "up").exists() and (tmp_path / "up").read_text() != "")
        process.send_signal(number)
        assert process.wait(timeout=600) == -number
    runs = Path("/proc", (tmp_path / "up").read_text())
    wait_until(lambda: not runs.exists())


def test_options_of_the_interpreter_are_the_interpreters(tmp_path: Path) -> None:
    done = subprocess.run(
        [find_warm_python(), "-I", "-S", "-c", "import sys; print('torch' in sys.modules, sys.flags.isolated)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False 1\n"
