"""A folder in which the commands of the docs run as they are written: what they name is there, small.

The checkout's folders are links. Models of the hub are folders of the same names (`Qwen/Qwen3-4B` is a path, too),
with tiny weights. It refuses to install anything: the environment of the tests is the `.venv` that scripts make.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from calc_releases import PYTHON, build, make_row
from doc_pages import ROOT
from test_cli_check_tasks import IMAGE, install_pytest
from tiny_paper_model import build_tiny_paper_model
from tiny_qwen import build_tiny_qwen3

from polar_trl.cache import CACHE_VARIABLE, find_cache
from polar_trl.tasks.folders import Tools

LINKS = ("configs", "constraints", "examples", "polar_trl", "scripts", "tests", "docs", ".cache", "pyproject.toml")
FIRST = "runs/first"
PLACEHOLDERS = {
    r"\bIMAGE\b": IMAGE,
    r"\bpython:3\.11\b": IMAGE,
    r"\bRUN/sessions/\.\.\./ID\.jsonl": f"{FIRST}/sessions/*/train_00000/train-00000-g000-r000.jsonl",
    r"\bRUN\b": FIRST,
}
"""What commands name that is the reader's own, or has to be downloaded -> what is here."""
ONE_STEP = (
    "--max_steps 1 --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --num_generations 4 "
    "--drop_zero_variance false --entropy_coef 0.01"
)
"""Overrides that make a step of the quickstart small, and one with a gradient whatever is sampled."""


@dataclass(frozen=True)
class Workspace:
    """Where commands run."""

    folder: Path
    env: dict[str, str]

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=280,
        )


def build_workspace(folder: Path, smollm2: Path) -> Workspace:
    """Fill an empty folder. The run `runs/first` is made by the first command of the README."""
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
    run = (ROOT / "configs" / "quickstart.yaml").read_text().splitlines(keepends=True)
    (folder / "my_run.yaml").write_text("".join(line for line in run if not line.startswith("grader:")))
    return Workspace(folder, env)


def _build_environment(folder: Path) -> None:
    """A `.venv` that scripts/install.sh finds up to date."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    sources = ("pyproject.toml", "constraints/cpu.txt", "scripts/install.sh")
    wanted = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in sources))
    (folder / ".venv" / "installed").write_text(f"{wanted.hexdigest()}  -\n")


def _build_models(folder: Path, smollm2: Path) -> None:
    (folder / "Qwen").mkdir()
    build_tiny_qwen3(smollm2, folder / "Qwen" / "Qwen3-4B")
    build_tiny_paper_model(smollm2, folder / "Qwen" / "Qwen3.5-4B")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(smollm2)


def _build_tasks(folder: Path, env: dict[str, str]) -> None:
    """`tasks/`: a task with hidden tests; `my_tasks.jsonl`: two with commands. Agents are those of this machine."""
    (folder / "cache").mkdir()
    (folder / "cache" / "agents").symlink_to(find_cache("agents"))
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
        {"id": f"{word}-1", "instruction": f"Write {word} into out.txt", "grader": f"grep -qx {word} out.txt"}
        for word in ("hello", "pear")
    ]
    (folder / "my_tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _build_agent(folder: Path) -> None:
    """`my-agent --yes INSTRUCTION`, found on PATH, and a settings file of its own."""
    (folder / "bin").mkdir()
    agent = folder / "bin" / "my-agent"
    agent.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -I -S {ROOT}/examples/shell_agent.py --max-turns 2 -- "$@"\n'
    )
    agent.chmod(0o755)
    (folder / "my_settings.json").write_text("{}\n")
