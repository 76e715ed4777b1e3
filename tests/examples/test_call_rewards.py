"""Test examples/call_rewards: its tasks are what its command makes, and each call of a session is credited alone."""

import json
import subprocess
from pathlib import Path

import pytest
from doc_pages import ROOT
from launch import find_warm_python
from reconstruct_sessions import build_rollout

from examples.call_rewards.lines import grade_lines
from polar_trl import FunctionGrader
from polar_trl.run_folder import read_log
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tasks.jsonl import load_tasks

FOLDER = ROOT / "examples" / "call_rewards"
NUM_LINES = 4
SMALL = (
    *("--max_steps", "1", "--gradient_accumulation_steps", "1", "--sandbox", "local", "--eval_on_start", "false"),
    *("--eval_strategy", "no", "--save_strategy", "no"),
)


@pytest.mark.parametrize(("name", "split", "num"), [("tasks", "train", 24), ("held_out", "test", 12)])
def test_the_tasks_are_what_the_command_makes(name: str, split: str, num: int, tmp_path: Path) -> None:
    made = tmp_path / "made.jsonl"
    command = [
        find_warm_python(),
        str(FOLDER / "lines.py"),
        "--num",
        str(num),
        "--split",
        split,
        "--output",
        str(made),
    ]
    subprocess.run(command, check=True, timeout=300)
    assert made.read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()
    for task in load_tasks(made):
        files = [path for line in task.metadata["lines"] for path in line["expected"]]
        assert len(set(files)) == len(files) == len(task.instruction.splitlines()) == NUM_LINES


def test_a_call_is_rewarded_for_its_line_alone() -> None:
    task = load_tasks(FOLDER / "tasks.jsonl")[0]
    calls = build_rollout(([0], [100]), ([0, 100, 0], [101]), ([9], [102])).calls
    backend = LocalSandboxBackend()
    sandbox = backend.create(task, "session")
    try:
        done = sandbox.run(task.metadata["lines"][1]["gold"], env={}, timeout_s=60)
        given = FunctionGrader(grade_lines).grade_session(task, sandbox, calls, timeout_s=60)
    finally:
        sandbox.destroy()
        backend.close()
    # a session that was cut has fewer calls than lines
    assert (done.exit_code, given.reward, given.call_rewards) == (0, 0.25, {0: 0.0, 1: 1.0, 2: 0.0})


def test_calls_of_a_session_have_advantages_of_their_own(smollm2: Path, tmp_path: Path) -> None:
    command = [find_warm_python(), "-m", "polar_trl", "train", "examples/call_rewards/run.yaml", *SMALL]
    command += ["--model_name_or_path", str(smollm2), "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (step,) = [line for line in read_log(tmp_path / "run") if "reward" in line]
    # four calls, of which each reward counts in the session's as a quarter
    assert 0 < step["reward"] < 1 and step["polar/call_reward"] == pytest.approx(step["reward"], abs=1e-5)
    rows = [json.loads(line) for path in (tmp_path / "run").glob("rows/*/train_*.jsonl") for line in path.open()]
    rows = [row for row in rows if row["type"] == "row"]
    assert {len(row["calls"]) for row in rows} == {NUM_LINES}
    assert any(len(set(row["advantages"])) > 1 for row in rows)
