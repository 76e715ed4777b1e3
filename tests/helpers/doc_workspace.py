"""Make a folder in which the commands of the docs run as they are written: what they name is there, small.

The checkout's folders are links. Models of the hub are folders of the same names (`Qwen/Qwen3-4B` is a path, too),
without weights. Nothing is installed: the environment of the tests is the `.venv` that scripts make.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from calc_releases import PYTHON, build, make_row
from doc_commands import FIRST
from environments import IMAGE, install_pytest
from launch import find_warm_python
from tiny_paper_model import build_tiny_paper_model
from transformers import AutoTokenizer, PreTrainedConfig, Qwen3_5Config, Qwen3Config

from polar_trl.cache import CACHE_VARIABLE, find_cache
from polar_trl.tasks.build.folders import Tools

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("constraints", "examples", "polar_trl", "scripts", "tests", "docs", ".cache", "pyproject.toml")
PLACEHOLDERS = {
    r"\bIMAGE\b": IMAGE,
    r"\bpython:3\.11\b": IMAGE,
    r"\bRUN/sessions/\.\.\./ID\.jsonl": f"{FIRST}/sessions/*/train_00002/train-00002-g000-r000.jsonl",
    r"\bRUN\b": FIRST,
}
"""What commands name that is the reader's own, or has to be downloaded, and what is here instead."""


@dataclass(frozen=True)
class Workspace:
    """The folder and the environment in which commands run."""

    folder: Path
    env: dict[str, str]

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of the docs, placeholders filled in."""
        for pattern, value in PLACEHOLDERS.items():
            command = re.sub(pattern, value, command)
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,
        )


def build_workspace(folder: Path, smollm2: Path) -> Workspace:
    """Fill an empty folder. The run `FIRST` is made by the first command of the README."""
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    _build_environment(folder)
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{folder / '.venv' / 'bin'}:{os.environ['PATH']}",
        CACHE_VARIABLE: str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    _build_models(folder, smollm2)
    _build_tasks(folder, env)
    _build_agent(folder)
    shutil.copy(ROOT / "polar_trl" / "configs" / "own_agent.yaml", folder / "my_run.yaml")
    for name in ("run.yaml", "cpu.yaml"):
        (folder / name).symlink_to(ROOT / "examples" / "own_repository" / name)
    page = (ROOT / "docs" / "own-agent.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (folder / "my_agents.py").write_text(block[1])
    return Workspace(folder, env)


def _build_environment(folder: Path) -> None:
    """A `.venv` that scripts/install.sh finds up to date, whose Python is warm."""
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name not in ("installed", "bin"):
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / "bin").mkdir()
    warm = Path(find_warm_python()).parent
    for path in Path(sys.prefix, "bin").iterdir():
        (folder / ".venv" / "bin" / path.name).symlink_to(
            warm / path.name if path.name in ("python", "polar-trl") else path
        )
    sources = ("pyproject.toml", "constraints/cpu.txt", "scripts/install.sh")
    wanted = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in sources))
    (folder / ".venv" / "installed").write_text(f"{wanted.hexdigest()}  -\n")


def _build_models(folder: Path, smollm2: Path) -> None:
    """`tiny` and `path/to/model` have weights; those of the hub's names have their configurations and a tokenizer."""
    build_tiny_paper_model(smollm2, folder / "tiny")
    for name, config in (("Qwen3-4B", build_qwen3_4b()), ("Qwen3.5-4B", build_qwen35_4b())):
        config.save_pretrained(folder / "Qwen" / name)
        AutoTokenizer.from_pretrained(folder / "tiny").save_pretrained(folder / "Qwen" / name)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(smollm2)


def build_qwen3_4b() -> PreTrainedConfig:
    """Of its sizes."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=2560, intermediate_size=9728,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40960,
    )  # fmt: skip


def build_qwen35_4b() -> PreTrainedConfig:
    """Of its text model's sizes; the vision tower's are transformers' defaults."""
    text = {
        "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "max_position_embeddings": 1 << 18, "tie_word_embeddings": True,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config={"out_hidden_size": 2560}, tie_word_embeddings=True)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    return config


def _build_tasks(folder: Path, env: dict[str, str]) -> None:
    """`tasks/`: a task with hidden tests; `my_tasks.jsonl`: two with commands. Agents are those of this machine."""
    (folder / "cache").mkdir()
    for part in ("agents", "models"):
        (folder / "cache" / part).symlink_to(find_cache(part))
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = env[CACHE_VARIABLE]
    try:
        requirements = folder / "requirements.txt"
        requirements.write_text("pytest  # of the docs' tests\n")
        install_pytest(requirements)
        build(make_row(), folder / "tasks", Tools(python=PYTHON, requirements=requirements))
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before
    rows = [
        {
            "id": f"{word}-1",
            "instruction": f"Write {word} into out.txt",
            "grader": f"grep -qx {word} out.txt || exit 1",
        }
        for word in ("hello", "pear")
    ]
    (folder / "my_tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _build_agent(folder: Path) -> None:
    """`my-agent/run --yes INSTRUCTION`, and a settings file of its own."""
    agent = folder / "my-agent"
    agent.mkdir()
    shutil.copy(ROOT / "polar_trl" / "configs" / "agents" / "shell_agent.py", agent)
    script = '#!/bin/sh\nshift\nexec python3 -I -S "$(dirname "$0")/shell_agent.py" --max-turns 2 -- "$@"\n'
    (agent / "run").write_text(script)
    (agent / "run").chmod(0o755)
    (folder / "my_settings.json").write_text("{}\n")
