"""Test that a torchvision for CUDA beside a CPU build of torch takes nothing down once `polar_trl` is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FAILS = 'raise RuntimeError("operator torchvision::nms does not exist")\n'


def run(folder: Path, version: str, code: str) -> str:
    """Run a program where such a torchvision is installed; what it prints, or the last line of its error."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(FAILS)
    about = folder / f"torchvision-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchvision\nVersion: {version}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def cpu_build() -> None:
    assert torch.__version__.endswith("+cpu"), "these tests are for the environment of scripts/install.sh"


def test_without_polar_trl_nothing_can_be_imported(tmp_path: Path) -> None:
    assert "AutoProcessor" in run(tmp_path, "0.28.0", "from transformers import AutoProcessor")


def test_with_it_everything_can(tmp_path: Path) -> None:
    code = (
        "import polar_trl, trl.trainer.grpo_trainer, vllm.entrypoints.llm\n"
        "from transformers.utils import is_torchvision_available\nprint(is_torchvision_available())"
    )
    assert run(tmp_path, "0.28.0", code) == "False"


def test_a_build_for_the_cpu_is_left_alone(tmp_path: Path) -> None:
    said = run(tmp_path, "0.28.0+cpu", "import polar_trl, torchvision")
    assert said == "RuntimeError: operator torchvision::nms does not exist"
