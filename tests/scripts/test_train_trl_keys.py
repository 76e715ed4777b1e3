"""A run file with the keys of `trl grpo`: a data set by name, a reward function and an agent by their paths."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import find_warm_python
from records import read_session

from polar_trl.run_folder import read_log

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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reward_funcs": ["my_rewards.shrt"]},
            "reward_funcs 'my_rewards:shrt': my_rewards (",
        ),
        ({"dataset_name": "row.jsonl"}, "dataset_name 'row.jsonl' cannot be loaded"),
        ({"agent_timeout_s": -1}, "agent_timeout_s must be above 0 (it is -1)"),
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
