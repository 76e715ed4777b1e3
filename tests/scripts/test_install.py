"""Test what scripts/install.sh says before it installs anything."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "VENV": str(tmp_path / "venv")}
    command = ["bash", str(ROOT / "scripts" / "install.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)


def test_help(tmp_path: Path) -> None:
    done = start(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Make or update the virtual environment .venv") and "VENV=" in done.stdout
    assert "set -euo" not in done.stdout and not (tmp_path / "venv").exists()


def test_an_argument_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "--upgrade")
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert done.stderr == "install: takes no --upgrade; VENV= and PYTHON= say where and with what, see --help\n"
