"""Test docs/own-repository.md: its files are those of examples/own_repository, and its commands run in their order."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT, find_blocks, list_lines
from environments import IMAGE, copy_pytest, install_pytest
from launch import list_warm_programs
from records import read_session

from polar_trl.cache import CACHE_VARIABLE

EXAMPLE = ROOT / "examples" / "own_repository"
PAGE = ROOT / "docs" / "own-repository.md"
ON_A_GPU, ON_A_CPU = (list_lines(block)[1:] for block in find_blocks(PAGE, "bash"))
MODEL = "polar_trl:models/SmolLM2-135M-Instruct"
TWO_CORES = (
    "--use_cpu true --bf16 false --gradient_checkpointing false --vllm_enable_sleep_mode false "
    f"--model_name_or_path {MODEL} --vllm_max_model_length 2048 --max_completion_length 48"
)
SMALL = {
    "polar-trl eval": "--limit 1 --num_samples 1 --k 1",
    "polar-trl train": "--max_steps 1 --gradient_accumulation_steps 2 --num_generations 2 --save_strategy steps",
}
"""What makes each kind of command small enough for a test."""


@pytest.fixture
def folder(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, and a cache with the small model and pytest."""
    folder = tmp_path / "own_repository"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    cache = tmp_path / "cache"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / smollm2.name).symlink_to(smollm2)
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    install_pytest(folder / "image" / "requirements.txt")
    return folder


def run(command: str, folder: Path) -> str:
    """Run a command as the page has it, with what makes it small behind it; return what it printed."""
    env = os.environ | {"PATH": list_warm_programs(), "COLUMNS": "200"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout + done.stderr


def test_the_page_shows_the_files_as_they_are() -> None:
    for language, name in (("dockerfile", "image/Dockerfile"), ("yaml", "run.yaml"), ("python", "image/agent.py")):
        (block,) = find_blocks(PAGE, language)
        assert block in (EXAMPLE / name).read_text(), name
    (block,) = find_blocks(PAGE, "json")
    tasks = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
    assert json.loads(block) == tasks[0] and len(tasks) == 4


def test_on_two_cores_without_an_engine(folder: Path) -> None:
    check, doctor, evaluate, train, inspect = ON_A_CPU
    assert "4 of 4 tasks are good" in run(check, folder)
    assert "works: yes" in run(doctor, folder)
    assert "pass@1" in run(f"{evaluate} --limit 1", folder)
    said = run(f"{train} --max_steps 1 --gradient_accumulation_steps 1", folder)
    assert "Dockerfile" not in said  # nothing of the image is missing
    (again,) = re.findall("^evaluate: +(polar-trl eval .*)$", said, re.MULTILINE)
    assert "1, 1 graded" in run(f"{again} --limit 1", folder)
    assert (folder / "runs" / "cpu-eval" / "summary.json").exists()
    sessions = [read_session(path) for path in (folder / "runs" / "cpu").glob("sessions/**/*.jsonl")]
    assert [(len(rollout.calls) > 0, rollout.reward) for rollout in sessions] == [(True, 0.0)] * 4
    assert inspect == "polar-trl inspect runs/cpu"


@pytest.fixture
def base_image(tmp_path: Path) -> Iterator[None]:
    """A stand-in for the registry's python:3.11-slim: pytest is there, and pip and apt-get install nothing."""
    context = tmp_path / "base"
    copy_pytest(context / "site")
    lines = [
        f"FROM {IMAGE}",
        "COPY site /usr/lib/python3/dist-packages",
        "RUN printf '#!/bin/sh\\n' > /usr/bin/pip && cp /usr/bin/pip /usr/bin/apt-get && chmod 755 /usr/bin/pip "
        "/usr/bin/apt-get",
    ]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    subprocess.run(["docker", "build", "--quiet", "--tag", "python:3.11-slim", str(context)], check=True)
    yield
    subprocess.run(["docker", "rmi", "--force", "python:3.11-slim"], check=False, capture_output=True)


@pytest.mark.containers
def test_on_a_gpus_commands_in_containers(folder: Path, base_image: None) -> None:
    check, doctor, plan, before, train, after, inspect = ON_A_GPU
    assert "4 of 4 tasks are good" in run(check, folder)
    assert "works: yes" in run(doctor, folder)
    assert plan == "polar-trl plan --config run.yaml --gpu 80GB"  # tests/docs runs it on a model of that size
    assert "pass@1" in run(f"{before} {SMALL['polar-trl eval']} {TWO_CORES}", folder)
    run(f"{train} {SMALL['polar-trl train']} {TWO_CORES}", folder)
    assert (folder / "runs" / "own_repository" / "checkpoint-1" / "adapter_model.safetensors").exists()
    sessions = [read_session(path) for path in (folder / "runs" / "own_repository").glob("sessions/**/*.jsonl")]
    assert [(len(rollout.calls) > 0, rollout.reward) for rollout in sessions] == [(True, 0.0)] * 2
    last = TWO_CORES.replace(MODEL, "runs/own_repository")
    assert "pass@1" in run(f"{after} {SMALL['polar-trl eval']} {last}", folder)
    assert inspect == "polar-trl inspect runs/own_repository"
