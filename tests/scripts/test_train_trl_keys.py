"""A run file with the keys of `trl grpo`: a data set by name, a reward function and an agent by their paths."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import find_warm_python
from records import read_session

from polar_trl.run_folder import find_evaluation, read_log

ROOT = Path(__file__).resolve().parents[2]
COUNTING = ROOT / "tests" / "grpo" / "workers" / "counting_agent.py"
PAGE = ROOT / "docs" / "from-trl.md"
AGENT = f"""
from pathlib import Path

from polar_trl import ShellHarness


class Counting(ShellHarness):
    def __init__(self, *, calls: int) -> None:
        text = Path({str(COUNTING)!r}).read_text().replace("NUM_CALLS = 3", f"NUM_CALLS = {{calls}}")
        super().__init__("python3 -I -S ~/agent.py {{instruction}}", files={{"agent.py": text}})
"""
REWARDS = """
def short(completions, level, task, **_):
    assert [item.metadata["level"] for item in task] == level
    return [float(len(completion) % 5) for completion in completions]
"""

GRADER = """
import itertools

numbers = itertools.count()


def grade(task, sandbox):
    return 1.0 / (1 + next(numbers))
"""


def write(folder: Path, model: Path, **settings: Any) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "task 0: ok", "level": 3}\n{"prompt": "task 1: ok", "level": 4}\n')
    (folder / "my_agents.py").write_text(AGENT)
    (folder / "my_rewards.py").write_text(REWARDS)
    page = yaml.safe_load(PAGE.read_text().split("```yaml\n")[1].split("```")[0])
    keys = {
        "model_name_or_path": str(model),
        "output_dir": "run",
        "sandbox": "local",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 8,
        "vllm_max_model_length": 512,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump({**page, **keys, **settings}))


def train(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [find_warm_python(), "-m", "polar_trl", "train", "run.yaml"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)


def test_the_run_file_of_the_page_trains(tiny_model: Path, tmp_path: Path) -> None:
    write(tmp_path, tiny_model)
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in read_log(tmp_path / "run") if "reward" in line]
    assert line["rewards/short/mean"] == line["reward"]
    sessions = [read_session(path) for path in tmp_path.glob("run/sessions/**/*.jsonl")]
    assert [len(session.calls) for session in sessions] == [2] * 4


def test_a_run_file_with_named_evaluation_sets_names_its_best_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    tasks = [{"id": f"t{i}", "instruction": f"task {i}: ok", "metadata": {"level": 1}} for i in range(4)]
    rows = [json.dumps(task) + "\n" for task in tasks]
    for name, lines in (("easy.jsonl", rows[:1]), ("hard.jsonl", rows[1:])):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "my_grader.py").write_text(GRADER)
    settings = {
        "eval_tasks": {"easy": "easy.jsonl", "hard": "hard.jsonl"},
        "grader": "my_grader:grade",
        "reward_weights": [1.0, 0.0],
        "per_device_eval_batch_size": 1,
        "num_generations_eval": 1,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
    }
    write(tmp_path, tiny_model, **settings)
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "run"
    lines = {(line["step"], name): line for line in read_log(run) if (name := find_evaluation(line))}
    assert sorted(lines) == [(step, name) for step in range(4) for name in ("easy", "hard")]
    assert [lines[0, name][f"eval_{name}_graded"] for name in ("easy", "hard")] == [1, 3]
    # the grader's numbers are one after the other: step 1 of the first set is the best, and the oldest
    best = json.loads((run / "best.json").read_text())
    rewards = {step: lines[step, "easy"]["eval_easy_reward"] for step in (1, 2, 3)}
    step = max(rewards, key=lambda step: rewards[step])
    assert step == 1
    assert (best["checkpoint"], best["metric"], best["value"]) == ("checkpoint-1", "eval_easy_reward", rewards[1])
    assert json.loads((run / "summary.json").read_text())["best"] == best
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    assert "evaluation of hard at step 2  solved " in done.stdout
    assert "held-out tasks of easy before (" in done.stdout and "held-out tasks of hard before (" in done.stdout
    assert "best:       checkpoint-1, step 1: eval_easy_reward " in done.stdout
    assert "evaluate:   polar-trl eval --config run.yaml --tasks easy.jsonl --model_name_or_path run" in done.stdout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reward_funcs": ["my_rewards.shrt"]},
            "reward_funcs 'my_rewards:shrt': my_rewards (",
        ),
        ({"dataset_name": "row.jsonl"}, "dataset_name 'row.jsonl' cannot be loaded"),
        ({"agent_timeout_s": -1}, "agent_timeout_s must be above 0 (it is -1)"),
        ({"eval_tasks": {"a b": "rows.jsonl"}}, "eval_tasks has a set 'a b'; give a name of letters, digits, _ and -"),
        ({"eval_tasks": {"easy": 3}}, "eval_tasks: the set 'easy' is 3; give a file, a folder or a data set"),
        ({"eval_tasks": {"easy": "no.jsonl"}}, "no task file at no.jsonl"),
        ({"eval_tasks": {}}, "eval_tasks names no set; leave it out"),
        ({"eval_tasks": "{easy: a.jsonl}"}, "eval_tasks is not JSON"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tiny_model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write(tmp_path, tiny_model, **settings)
    done = train(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"train: {message}"), done.stderr[-2000:]
    assert not (tmp_path / "run" / "sessions").exists()
