"""Bad input to scripts/train.py: one sentence, the right exit, and nothing loaded or written."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "configs/nope.yaml"], "No such file or directory: 'configs/nope.yaml'"),
        (["--config", "configs/quickstart.yaml", "--lerning_rate", "1"], "Did you mean 'learning_rate'?"),
        (["--config", "configs/quickstart.yaml", "--top_p", "0.9"], "top_p must stay 1.0"),
        (["--config", "configs/quickstart.yaml", "--tasks", "nope.jsonl"], "no task file at nope.jsonl"),
        (
            ["--config", "configs/quickstart.yaml", "--model_name_or_path", "no/such/model"],
            "no model at 'no/such/model'",
        ),
        (["--config", "configs/quickstart.yaml", "--agent_files", "nope.py"], "nope.py"),
        (
            ["--config", "configs/quickstart.yaml", "--grader", "polar_trl.tasks.shell_ladder:nope"],
            "cannot be imported",
        ),
        (
            ["--config", "configs/quickstart.yaml", "--attn_implementation", "odd"],
            "attn_implementation is not read here",
        ),
    ],
)
def test_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *arguments, "--output_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("train: ")
    assert message in last
    assert not (tmp_path / "run" / "sessions").exists()


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text((ROOT / "configs" / "quickstart.yaml").read_text() + "\nmax_agent: 3\n")
    done = subprocess.run(
        [sys.executable, "scripts/train.py", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "max_agent" in done.stderr.strip().splitlines()[-1]
