"""A run whose grader fails is mended and started again by the same command; steps that teach nothing say why."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "tests" / "grpo" / "workers" / "counting_agent.py"
SETTINGS = {
    "agent_command": "python3 -I -S ~/counting_agent.py {instruction}; my-cleanup",
    "agent_files": [str(AGENT)],
    "grader": "near_grades:grade",
    "max_steps": 2,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "report_to": "none",
    "vllm_max_model_length": 512,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def test_a_failed_first_batch_is_mended_and_run_again(tiny_model: Path, tmp_path: Path) -> None:
    tasks = [{"id": f"t{i}", "instruction": f"task {i}: ok"} for i in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    settings = {**SETTINGS, "tasks": "tasks.jsonl", "model_name_or_path": str(tiny_model), "output_dir": "run"}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # which is YAML
    # -P: the current folder is not on the path of Python, as with the console script
    command = [sys.executable, "-P", "-m", "polar_trl", "train", "run.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def train() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    (tmp_path / "near_grades.py").write_text("def grade(task, sandbox):\n    return task.metadata['points']\n")
    failed = train()
    assert failed.returncode == 1
    said = "KeyError: 'points' (near_grades.py:2 in grade, `return task.metadata['points']`)"
    last = failed.stderr.strip().splitlines()[-1]
    assert last.endswith(f"train: no rollout of the first batch has a reward; most often: the grader failed: {said}")
    sessions = list((tmp_path / "run").glob("sessions/*/*/*.jsonl"))
    assert len(sessions) == 4
    assert failed.stderr.count("has no reward") == 3  # the 1st, 2nd and 4th of four

    (tmp_path / "near_grades.py").write_text("def grade(task, sandbox):\n    return 0\n")
    done = train()
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert "the run begins; sessions of an earlier start stay in run/sessions" in said
    assert "step 1: 4 of 4 sessions: agent exit code 127: " in said
    assert "step 1 taught nothing: all 4 rewards are 0; 4 of 4 sessions: agent exit code 127: " in said
    assert "2 of 2 steps taught nothing; 2 of them: all 4 rewards are 0" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps_that_taught_nothing"] == 2 and "agent_command" in summary["try"]
    [reason] = summary["reasons"]
    assert (reason["reason"], reason["sessions"]) == ("agent exit code 127", 8)
    assert "my-cleanup: command not found" in reason["example"]
    record = json.loads((tmp_path / "run" / reason["record"]).read_text().splitlines()[-1])
    assert record["agent_exit"]["exit_code"] == 127
    assert all(path.exists() for path in sessions)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["polar/taught_nothing"] for line in log if "reward" in line] == [1.0, 1.0]

    again = train()
    assert again.returncode == 1 and "holds a run that is over and has no checkpoint" in again.stderr
