"""A script for TRL's trainer, switched to ours by a few lines; both are run for a step."""

import difflib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python
from records import read_session

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "trl_switch"


def read_code(name: str) -> list[str]:
    """The lines of a script without its docstring, which names the script, and without empty ones."""
    text = (EXAMPLE / name).read_text().split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]


def test_at_most_five_lines_change() -> None:
    diff = list(difflib.ndiff(read_code("trl_grpo.py"), read_code("polar_grpo.py")))
    removed = [line for line in diff if line.startswith("- ")]
    added = [line for line in diff if line.startswith("+ ")]
    assert 0 < len(removed) <= len(added) <= 5, added


@pytest.fixture(params=["trl_grpo.py", "polar_grpo.py"])
def trained(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> tuple[str, Path]:
    """The script's name, and the folder of one step of it."""
    settings: dict[str, Any] = {
        "model_name_or_path": tiny_model,
        "output_dir": tmp_path / "run",
        "max_steps": 1,
        "max_completion_length": 16,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
    }
    if request.param == "polar_grpo.py":
        settings |= {"max_session_calls": 2, "vllm_max_model_length": 2048, "max_agents": 4}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [find_warm_python(), str(EXAMPLE / request.param), *flags],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, tmp_path / "run"


def test_both_scripts_train_and_save_the_model(trained: tuple[str, Path]) -> None:
    name, run = trained
    state = json.loads((run / "checkpoint-1" / "trainer_state.json").read_text())
    assert "rewards/names_both/mean" in state["log_history"][0]
    assert (run / "model.safetensors").is_file()
    if name == "polar_grpo.py":
        sessions = [read_session(path) for path in run.glob("sessions/**/*.jsonl")]
        assert len(sessions) == 4 and all(len(session.calls) >= 1 for session in sessions)
