"""Test that a run from Python is like one from a file: what it refuses, leaves in its folder, and closes by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import WORKERS

from polar_trl.grpo.resume.checkpoint import GO_ON


@pytest.fixture(scope="module")
def ended(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Five trainers in one process, one of them interrupted, three never closed; its folder, and how it ended."""
    out, tmp = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("tmp")
    done = subprocess.run(
        [sys.executable, str(WORKERS / "python_run_worker.py"), str(tiny_model), str(out)],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "TMPDIR": str(tmp), "POLAR_TRL_TEST": str(out)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    left = [path.name for path in tmp.rglob("polar-trl-*/*")]
    assert left == []
    return out, done


def load(ended: tuple[Path, Any]) -> dict[str, Any]:
    return json.loads((ended[0] / "result.json").read_text())


def test_an_interrupt_says_how_to_go_on_and_closes(ended: tuple[Path, Any]) -> None:
    checkpoint = ended[0] / "a" / "checkpoint-1"
    assert load(ended)["notes"] == [f"stopped at step 1; {GO_ON} goes on from {checkpoint}"]
    assert 'train(resume_from_checkpoint="auto")' in GO_ON and "--resume_from_checkpoint auto" in GO_ON
    closed = 'this trainer is closed; build another one, whose train(resume_from_checkpoint="auto") goes on'
    assert load(ended)["closed"] == [closed, closed]


def test_the_folder_of_another_run_is_refused_and_gone_on_with(ended: tuple[Path, Any]) -> None:
    assert "holds a run already (checkpoint-1)" in load(ended)["refused"]
    trained = [json.loads(line)["step"] for line in (ended[0] / "a" / "trained.jsonl").read_text().splitlines()]
    assert trained == [1, 2]


def test_it_leaves_the_model_a_summary_and_a_picture(ended: tuple[Path, Any]) -> None:
    run = ended[0] / "a"
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["rewards"]) == 2
    evaluations = summary["evaluations"]
    assert evaluations[0]["step"] == 0 and evaluations[-1]["step"] == 2
    assert evaluations[0]["graded"] == 2  # of each task, once
    assert (run / "rewards.png").exists() and (run / "adapter_model.safetensors").exists()
    assert f"model:      {run}" in ended[1].stdout


def test_the_terminal_has_the_runs_own_lines_alone(ended: tuple[Path, Any]) -> None:
    lines = ended[1].stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2", "1/1", "1/1", "1/1"]
    assert sum(line.startswith("solved ") for line in lines) == 1
    assert not [line for line in lines if line.startswith("{")]
    assert "it/s" not in ended[1].stderr and "Traceback" not in ended[1].stderr
    libraries = (ended[0] / "a" / "libraries.log").read_text()
    assert "safetensors" in libraries


def test_a_trainer_is_closed_by_the_next_one_by_with_and_as_garbage(ended: tuple[Path, Any]) -> None:
    result = load(ended)
    assert result["second_is_closed"] and result["third_is_closed"] and result["fourth_is_closed"]


def test_the_next_one_is_no_rank_of_the_one_before(ended: tuple[Path, Any]) -> None:
    assert load(ended)["is_wrapped"] != "DistributedDataParallel"


def test_nothing_runs_on(ended: tuple[Path, Any]) -> None:
    name = f"POLAR_TRL_TEST={ended[0]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert name not in (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
