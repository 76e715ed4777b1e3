"""Test scripts/table/run.py: steps at a time, again, of an earlier model, and interrupted. The steps are scripted."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import psutil
import pytest
from table.run import Running, find_gpus, share_gpus
from table.steps import Step
from table_cells import read_rows, record_cell

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
FAKE = """
import os, shutil, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
out = Path(words[words.index("--output_dir") + 1])
with (out.parent / "calls.txt").open("a") as file:
    print(out.name, file=file)
if (out.parent / ("fail " + out.name)).exists():
    sys.exit(3)
if (out.parent / ("wait " + out.name)).exists():
    def end(*_):
        time.sleep(0.2)
        print("tidied up", flush=True)
        sys.exit(130)
    signal.signal(signal.SIGTERM, end)
    print("GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    print("begun", flush=True)
    time.sleep(60)
if words[0] == "eval":
    shutil.copytree(out.parent.parent / ("better" if out.name.startswith("both") else "cell"), out, dirs_exist_ok=True)
else:
    out.mkdir(exist_ok=True)
"""
RUN = """
import signal, sys
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from table import steps
steps.POLAR = steps.SFT = (sys.executable, sys.argv[2])
steps.SFT += ("sft",)
sys.argv[1:] = sys.argv[3:]
import reproduce_table
reproduce_table.main()
"""


def drive(tmp_path: Path, *arguments: str, sigint: str = "heeded") -> list[str]:
    """The command of a driver whose steps are scripted."""
    fake = tmp_path / "fake.py"
    if not fake.exists():
        record_cell(tmp_path, "cell", 3)
        record_cell(tmp_path, "better", 7)
    fake.write_text(FAKE)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return [sys.executable, "-c", RUN, sigint, str(fake), "--out", str(out), "--config", "quickstart", *arguments]


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=200)


def take_calls(out: Path) -> list[str]:
    """Names of the folders that commands ran for since the last call."""
    path = out / "calls.txt"
    calls = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return calls


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_stages_of_an_agent_and_what_is_run_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = drive(tmp_path, "--agents", "pi", "--seeds", "0", "1")
    (out / "fail sft-pi-1").touch()
    done = run(command)
    assert done.returncode == 1, done.stderr
    first = ["base__pi", "data-pi"]
    first += [name for stage in ("sft", "grpo", "both") for name in (f"{stage}-pi-0", f"{stage}-pi-0__pi")]
    assert take_calls(out) == [*first, "sft-pi-1", "grpo-pi-1", "grpo-pi-1__pi"]
    assert "both-pi-1: left out, since sft-pi-1 failed" in done.stderr
    row = read_rows(done.stdout)["pi"][-4:]
    assert row[0].startswith("33.3 (") and row[1].endswith(", 1 of 2 seeds (failed)")
    assert row[2].startswith("33.3 (") and "seeds" not in row[2] and row[3].endswith(", 1 of 2 seeds (failed)")

    (out / "fail sft-pi-1").unlink()
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert take_calls(out) == ["sft-pi-1", "sft-pi-1__pi", "both-pi-1", "both-pi-1__pi"]
    gains = read_rows(done.stdout, "Gain over the base model, and its cost")
    assert gains["pi"][0] == "SFT and GRPO" and gains["pi"][1].startswith("+44.4 (")
    assert json.loads((out / "table.json").read_text())["complete"]
    assert run(command).stdout == done.stdout and take_calls(out) == []

    # another setting of the evaluations runs those again, and the matrix adds its own
    done = run([*drive(tmp_path, "--agents", "pi", "shell", "--seeds", "0", "--stages", "base", "grpo", "--matrix")])
    assert done.returncode == 0, done.stderr
    assert take_calls(out) == [
        *("base__shell", "grpo-shell-0", "grpo-shell-0__shell"),
        *("grpo-pi-0__shell", "grpo-shell-0__pi"),
    ]
    assert "missing" not in done.stdout.split("## Trained inside")[1]
    files = sorted(path.name for path in (out / "summaries").iterdir())
    assert "base.json" in files and "both-pi-1.json" in files and "grpo-shell-0.json" in files
    costs = json.loads((out / "summaries" / "both-pi-0.json").read_text())["cost"]
    lines = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    parts = [line["seconds"] for line in lines if line["step"] in ("data-pi", "sft-pi-0", "both-pi-0")]
    assert len(parts) == 3 and costs["seconds"] == pytest.approx(sum(parts), abs=0.01)


def test_what_is_of_an_earlier_model_is_not_taken_for_the_present_ones(tmp_path: Path) -> None:
    keys = ("--agents", "pi", "--stages", "base", "sft", "both")
    command, out = drive(tmp_path, *keys), tmp_path / "out"
    assert run(command).returncode == 0
    take_calls(out)
    command += ["--sft=--max_steps 3"]
    done = run(command)
    assert done.returncode == 1 and take_calls(out) == ["sft-pi-0"]
    assert (
        f"sft-pi-0__pi: {out}/sft-pi-0__pi is of an earlier sft-pi-0; remove it, or give another --out" in done.stderr
    )
    assert "both-pi-0__pi: left out, since both-pi-0 failed" in done.stderr
    row = read_rows(done.stdout)["pi"][-3:]
    assert row[0].startswith("33.3 (") and row[1:] == ["of an earlier model"] * 2
    for name in ("sft-pi-0__pi", "both-pi-0", "both-pi-0__pi"):
        shutil.rmtree(out / name)
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert take_calls(out) == ["sft-pi-0__pi", "both-pi-0", "both-pi-0__pi"]


def test_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    keys = ("--agents", "pi", "shell", "--stages", "base", "grpo", "--jobs", "2")
    command, out = drive(tmp_path, *keys), tmp_path / "out"
    for name in ("grpo-pi-0", "grpo-shell-0"):
        (out / f"wait {name}").touch()
    with subprocess.Popen(command, cwd=SCRIPTS, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not all("begun" in read_text(out / f"{name}.txt") for name in ("grpo-pi-0", "grpo-shell-0")):
            assert process.poll() is None
            time.sleep(0.05)
        second = run(command)
        assert second.returncode == 1 and "is being written by another process" in second.stderr
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 130 and rest.endswith(
        "stopped in grpo-pi-0, grpo-shell-0; the same command goes on\n"
    )
    for name in ("grpo-pi-0", "grpo-shell-0"):
        assert "tidied up" in read_text(out / f"{name}.txt")
        (out / f"wait {name}").unlink()
    gpus = [read_text(out / f"{name}.txt").split("GPU ")[1][0] for name in ("grpo-pi-0", "grpo-shell-0")]
    assert sorted(gpus) == ["4", "6"]
    (out / "fail grpo-pi-0").touch()
    done = run(drive(tmp_path, *keys))
    assert done.returncode == 1 and "grpo-pi-0__pi: left out, since grpo-pi-0 failed" in done.stderr
    calls = take_calls(out)
    assert calls[-1] == "grpo-shell-0__shell" and "grpo-pi-0__pi" not in calls
    (out / "fail grpo-pi-0").unlink()
    assert run(drive(tmp_path, *keys)).returncode == 0 and take_calls(out) == ["grpo-pi-0", "grpo-pi-0__pi"]


def test_steps_that_end_in_the_moment_of_an_interrupt_have_their_lines(tmp_path: Path) -> None:
    """As where a scheduler sends SIGTERM to every process."""
    command, out = drive(tmp_path, "--agents", "pi", "shell", "--stages", "grpo", "--jobs", "2"), tmp_path / "out"
    names = ["grpo-pi-0", "grpo-shell-0"]
    for name in names:
        (out / f"wait {name}").touch()
    with subprocess.Popen(command, cwd=SCRIPTS, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not all("begun" in read_text(out / f"{name}.txt") for name in names):
            assert process.poll() is None
            time.sleep(0.05)
        steps = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGSTOP)
        for step in steps:
            step.kill()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest
    lines = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    assert sorted(line["step"] for line in lines) == names


def test_gpus_have_cudas_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is given the host's fourth GPU has /dev/nvidia3, and it is CUDA's first."""
    for name in ("nvidia3", "nvidia7", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("table.run.DEVICES", tmp_path)
    for variable, expected in ((None, ["0", "1"]), ("4, 6", ["4", "6"]), ("", []), ("-1", []), ("GPU-ab", ["GPU-ab"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert find_gpus() == expected


def test_a_gpu_of_two_steps_counts_once() -> None:
    process = cast("subprocess.Popen[bytes]", None)
    alone, first, second = (Running(Step(name="", command=()), process, [gpu]) for gpu in ("0", "1", "1"))
    both = Running(Step(name="", command=()), process, ["0", "1"])
    share_gpus([alone, first, second], 6.0)
    share_gpus([alone, first, second, both], 6.0)
    assert [task.gpu_seconds for task in (alone, first, second, both)] == [9.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("number", "sigint"),
    [(signal.SIGTERM, "ignored"), (signal.SIGINT, "heeded"), (signal.SIGKILL, "ignored")],
)
def test_what_ends_it_ends_the_step_first_and_the_step_goes_on(
    tmp_path: Path, number: signal.Signals, sigint: str
) -> None:
    keys = ("--agents", "pi", "--stages", "base", "grpo")
    command, out = drive(tmp_path, *keys, sigint=sigint), tmp_path / "out"
    (out / "wait grpo-pi-0").touch()
    with subprocess.Popen(command, cwd=SCRIPTS, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "begun\n":
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stderr.read()
    ended = "tidied up\n"
    if number == signal.SIGKILL:
        assert (process.returncode, rest) == (-signal.SIGKILL, ended)
    else:
        assert (process.returncode, rest) == (130, ended + "stopped in grpo-pi-0; the same command goes on\n")
        last = json.loads((out / "times.jsonl").read_text().splitlines()[-1])
        assert (last["step"], last["status"]) == ("grpo-pi-0", 130)
    (out / "wait grpo-pi-0").unlink()
    take_calls(out)
    done = run(drive(tmp_path, *keys))
    assert done.returncode == 0, done.stderr
    assert take_calls(out) == ["grpo-pi-0", "grpo-pi-0__pi"]
