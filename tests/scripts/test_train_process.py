"""The process of a run: one for each folder, none without its launcher, and its end where a disk is full."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import mounted
from launch import ROOT, WORKERS, build_launcher

from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.grpo.resume.checkpoint import GO_ON, find_checkpoint
from polar_trl.run_folder import FolderLock, read_log


def write_config(folder: Path, model: Path, **settings: Any) -> Path:
    """A run file of a run that takes seconds for each step."""
    tasks, config = folder / "tasks.jsonl", folder / "run.yaml"
    tasks.write_text("".join(json.dumps({"id": f"t{i}", "instruction": f"task {i}: ok"}) + "\n" for i in range(4)))
    values = {
        "tasks": str(tasks),
        "model_name_or_path": str(model),
        "output_dir": str(folder / "run"),
        "sandbox": "local",
        "agent_command": "python3 -I -S ~/counting_agent.py {instruction}",
        "grader": "test -s answer.txt",
        "agent_files": [str(WORKERS / "counting_agent.py")],
        "max_steps": 1000,
        "save_steps": 1,
        "save_total_limit": 2,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 8,
        "report_to": "none",
        "vllm_max_model_length": 512,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    config.write_text(json.dumps(values | settings))  # which is YAML
    return config


def start(config: Path, *flags: str, launcher: tuple[str, ...] | None = None, tmp: Path | None = None) -> Any:
    """Start a run, by itself or by a launcher; what it says is in a file beside its settings."""
    before = (sys.executable,) if launcher is None else launcher
    number = len(list(config.parent.glob("said-*")))
    with (config.parent / f"said-{number}").open("wb") as log:
        return subprocess.Popen(
            [*before, str(ROOT / "scripts" / "train.py"), "--config", str(config), *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(tmp or config.parent)},
        )


def read_said(config: Path, number: int = 0) -> list[str]:
    return (config.parent / f"said-{number}").read_text(errors="replace").splitlines()


def list_said(config: Path, number: int = 0) -> list[str]:
    """The sentences of train.py itself; a progress bar may be before one on its line."""
    return [line[line.index("train: ") :] for line in read_said(config, number) if "train: " in line]


def wait_for(path: Path, process: Any, config: Path) -> None:
    while not path.exists():
        assert process.poll() is None, read_said(config)[-30:]
        time.sleep(0.1)


def find_processes(text: str) -> list[int]:
    """Processes whose command or environment names a folder, zombies aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_of_two_starts_at_once_one_runs_and_the_other_names_it(tiny_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model, max_steps=2)
    runs = [start(config) for _ in range(2)]
    codes = [run.wait() for run in runs]
    assert sorted(codes) == [0, 1]
    winner, loser = (codes.index(code) for code in (0, 1))
    (said,) = list_said(config, loser)
    named = f"is being written by another process (process {runs[winner].pid} on "
    assert said.startswith(f"train: output_dir {tmp_path / 'run'} {named}") and str(config) in said
    assert [line["step"] for line in map(json.loads, (tmp_path / "run" / "trained.jsonl").open())] == [1, 2]
    assert len({folder.name for folder in (tmp_path / "run" / "sessions").iterdir()}) == 1
    assert main(["replay", str(tmp_path / "run")]) == 0


def test_a_launch_of_two_ranks_is_kept_out_in_a_sentence(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "no-model")
    with FolderLock(tmp_path / "run"):
        launch = start(config, launcher=tuple(build_launcher(2)))
        assert launch.wait() == 1
    said = list_said(config)
    # of each, unless the launcher ends the second rank before it has spoken
    assert len(said) in (1, 2)
    assert all(f"(process {os.getpid()} on " in sentence for sentence in said)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["owner.lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_trainer_ends_with_its_launcher(
    tiny_model: Path, tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    config = write_config(tmp_path, tiny_model)
    launcher = build_launcher(2) if processes == 2 else [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    # by one process, accelerate starts the script itself; by several, torch's launcher does, in the same process
    launch = start(config, launcher=tuple(launcher))
    try:
        wait_for(tmp_path / "run" / "checkpoint-2" / "polar_state.json", launch, config)
        trainers = [pid for pid in find_processes(str(config)) if pid != launch.pid]
        launch.send_signal(number)
        launch.wait()
        while left := [pid for pid in find_processes(str(tmp_path)) if pid != launch.pid]:
            time.sleep(0.1)
    finally:
        for pid in find_processes(str(config)):
            os.kill(pid, signal.SIGKILL)
        launch.wait()
    assert len(trainers) >= processes and left == []
    said = list_said(config)
    assert len(said) == processes
    assert all(line.startswith("train: stopped at step ") for line in said)
    newest = find_checkpoint(tmp_path / "run")
    assert newest is not None
    assert any(line.endswith(f"{GO_ON} goes on from {newest}") for line in said)
    assert list(tmp_path.glob("polar-trl-*/*")) == []  # no sandbox
    while True:  # a process that ends loses its command line before its files
        try:
            FolderLock(tmp_path / "run").release()
            break
        except ConfigError:
            time.sleep(0.1)


def test_a_shell_that_ends_is_no_launcher(tmp_path: Path) -> None:
    """As after nohup and &: the parent is gone and the process goes on."""
    code = (
        "import os, sys, time\n"
        "from polar_trl.cli.process import sigterm_interrupts\n"
        "with sigterm_interrupts(with_launcher=True):\n"
        "    parent = os.getppid()\n"
        "    open(sys.argv[1] + '/ready', 'w').close()\n"
        "    while os.getppid() == parent: time.sleep(0.05)\n"
        "    time.sleep(2)\n"
        "    open(sys.argv[1] + '/lives', 'w').close()\n"
    )
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    script = f'"{sys.executable}" -c "$0" "{tmp_path}" & while [ ! -e "{tmp_path}/ready" ]; do sleep 0.1; done'
    subprocess.run(["bash", "-c", script, code], check=True, env=env)
    while find_processes(str(tmp_path)):
        time.sleep(0.1)
    assert (tmp_path / "lives").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.mark.parametrize(
    ("size", "whole"),
    [("300k", None), ("26m", "checkpoint-1")],
    ids=["in the records", "in the second checkpoint"],
)
def test_a_full_output_dir_ends_the_run_in_a_sentence_and_auto_goes_on(
    tiny_model: Path, tmp_path: Path, disk: Path, size: str, whole: str | None
) -> None:
    resize(disk, size)
    settings = {"save_total_limit": None, "output_dir": str(disk / "run"), "max_steps": 3, "log_completions": True}
    if whole is None:
        settings |= {"save_steps": 100, "max_steps": 400, "logging_steps": 1}
    config = write_config(tmp_path, tiny_model, **settings)
    assert start(config, "--resume_from_checkpoint", "auto").wait() == 1
    said = read_said(config)
    assert not [line for line in said if line.startswith("Traceback")]
    (sentence,) = list_said(config)
    assert ": No space left on device; make room, and " in sentence
    assert find_checkpoint(disk / "run") == (whole and disk / "run" / whole)
    steps = [line["step"] for line in map(json.loads, (disk / "run" / "trained.jsonl").open())]
    assert steps == list(range(1, len(steps) + 1))
    assert {line["step"] for line in read_log(disk / "run")} <= set(steps)
    assert main(["replay", str(disk / "run")]) == 0
    resize(disk, "500m")
    assert start(config, "--resume_from_checkpoint", "auto", "--max_steps", "3").wait() == 0
    assert [line["step"] for line in map(json.loads, (disk / "run" / "trained.jsonl").open())] == [1, 2, 3]
    assert main(["replay", str(disk / "run")]) == 0


def test_a_full_tmpdir_ends_the_run_in_a_sentence(tiny_model: Path, tmp_path: Path, disk: Path) -> None:
    resize(disk, "400m")
    config = write_config(tmp_path, tiny_model, save_strategy="no")
    run = start(config, tmp=disk)
    wait_for(tmp_path / "run" / "trained.jsonl", run, config)
    with (disk / "fill").open("wb", buffering=0) as file:
        while run.poll() is None:  # also what sessions give back when they end
            try:
                file.write(bytes(65536))
            except OSError:
                time.sleep(0.01)
    assert run.wait() == 1
    (sentence,) = list_said(config)
    assert sentence.startswith(f"train: {disk} cannot be written: No space left on device; make room, and ")
    assert main(["replay", str(tmp_path / "run")]) == 0
    shutil.rmtree(disk / "fill", ignore_errors=True)
