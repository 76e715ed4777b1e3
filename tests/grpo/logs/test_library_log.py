"""Test what goes to the file of libraries' output and what stays on the terminal, in processes of their own."""

import subprocess
import sys
from pathlib import Path

PRELUDE = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
from polar_trl.grpo.logs.library_log import LibraryLog
log, ours = LibraryLog(Path(sys.argv[1])), logging.getLogger("polar_trl.grpo.trainer")
"""


def run(tmp_path: Path, code: str) -> tuple["subprocess.CompletedProcess[str]", str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    return done, (tmp_path / "libraries.log").read_text()


def test_all_that_is_written_while_a_model_is_built(tmp_path: Path) -> None:
    done, file = run(
        tmp_path,
        """
print("first")
with log.everything():
    print("printed")
    os.write(1, b"by C on 1\\n"); os.write(2, b"by C on 2\\n")
    subprocess.run(["echo", "by a child"])
    warnings.warn("a warning")
    made = logging.StreamHandler(sys.stdout)
    logging.getLogger("vllm").addHandler(made)
    logging.getLogger("vllm").warning("by a handler")
    ours.warning("a warning of ours")
print("last"); os.write(2, b"2 is back\\n"); logging.getLogger("vllm").warning("by it afterwards")
""",
    )
    assert done.returncode == 0
    assert done.stdout == "first\nlast\n"
    assert done.stderr == "a warning of ours\n2 is back\nby it afterwards\n"
    for text in ("printed", "by C on 1", "by C on 2", "by a child", "UserWarning: a warning", "by a handler"):
        assert f"{text}\n" in file
    assert "ours" not in file and "afterwards" not in file


def test_a_handler_whose_stream_is_a_notebooks(tmp_path: Path) -> None:
    done, file = run(
        tmp_path,
        """
import io
sys.stderr = io.StringIO()
logging.getLogger("vllm").addHandler(logging.StreamHandler())
with log.everything():
    logging.getLogger("vllm").warning("inside")
logging.getLogger("vllm").warning("afterwards")
print(sys.stderr.getvalue(), end="")
""",
    )
    assert (done.stdout, file) == ("afterwards\n", "inside\n")


def test_an_error_names_the_file_and_is_seen(tmp_path: Path) -> None:
    done, file = run(
        tmp_path,
        """
with log.everything():
    os.write(2, b"the kernel is wrong\\n")
    raise RuntimeError("no engine")
""",
    )
    assert done.returncode == 1 and file == "the kernel is wrong\n"
    note = f"what libraries printed before is in {tmp_path / 'libraries.log'}"
    assert done.stderr.splitlines()[-2:] == ["RuntimeError: no engine", note]


def test_what_libraries_log_while_a_run_goes_on(tmp_path: Path) -> None:
    done, file = run(
        tmp_path,
        """
shown = logging.StreamHandler()
logging.getLogger("trl").addHandler(shown)
with log.logged(), log.logged():
    print("of a reward function")
    warnings.warn("of a reward function, too")
    warnings.warn_explicit("of a package", UserWarning, "/x/site-packages/y.py", 3)
    for name in ("trl.trainer", "vllm.engine"):
        logging.getLogger(name).warning("%s warns", name)
        logging.getLogger(name).error("%s fails", name)
    ours.warning("a warning of ours")
logging.getLogger("trl.trainer").warning("as before")
logging.getLogger("vllm.engine").warning("as before")
warnings.warn_explicit("shown again", UserWarning, "/x/site-packages/y.py", 4)
""",
    )
    assert done.stdout == "of a reward function\n"
    lines = [line for line in done.stderr.splitlines() if line.strip() != 'warnings.warn("of a reward function, too")']
    assert lines[0].endswith("UserWarning: of a reward function, too")
    assert lines[1:5] == ["trl.trainer fails", "vllm.engine fails", "a warning of ours", "as before"]
    assert lines[5:] and "as before" in lines[5:] and any("shown again" in line for line in lines[5:])
    assert file.count("vllm.engine warns") == 1
    assert "of a package" in file and "WARNING vllm.engine: vllm.engine warns" in file
    assert "ERROR trl.trainer: trl.trainer fails" in file
    assert "ours" not in file and "as before" not in file
