"""Test bad input to `polar-trl train`: one sentence, the right exit, and nothing loaded or written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import find_warm_python

from polar_trl.cli.train import format_eval

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nope"],
            "--config: no file at 'nope', and no run file of that name; there are ladder_commands, ladder_files",
        ),
        (
            ["--accelerate", "nope"],
            "no file at 'nope', and no accelerate file of that name; there are ddp_8gpu, deepsp",
        ),
        (["quickstart", "--lerning_rate", "1"], "Did you mean 'learning_rate'?"),
        (["quickstart", "--learning_rate", "fast"], "learning_rate is 'fast'; give a number"),
        (["quickstart", "--model_name_or_path", ""], "model_name_or_path is needed: a model"),
        (["quickstart", "--top_p", "0.9"], "top_p must stay 1.0"),
        (["quickstart", "--tasks", "nope.jsonl"], "no task file at nope.jsonl"),
        (
            ["quickstart", "--model_name_or_path", "no/such/model"],
            "no model at 'no/such/model'",
        ),
        (["quickstart", "--agent_files", "nope.py"], "agent_files: nope.py cannot be read"),
        (
            ["quickstart", "--gradient_accumulation_steps", "100"],
            "96 tasks are fewer than the 100 of one generation batch",
        ),
        (
            ["quickstart", "--grader", "polar_trl.tasks.shell_ladder:nope"],
            "has no 'nope'",
        ),
        (["quickstart", "--resume_from_checkpoint", "nope"], "resume_from_checkpoint: nope is no folder"),
        (
            ["quickstart", "--model_revision", "v2"],
            "model_revision is not read: the engine loads the default one",
        ),
    ],
)
def test_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [find_warm_python(), "-m", "polar_trl", "train", *arguments, "--output_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("train: ")
    assert message in last
    assert "usage:" not in done.stderr
    assert not (tmp_path / "run" / "sessions").exists()


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text((ROOT / "polar_trl" / "configs" / "quickstart.yaml").read_text() + "\nmax_agent: 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "polar_trl", "train", str(config)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "max_agent" in done.stderr.strip().splitlines()[-1]
    assert "gemm_4bit" not in done.stderr  # of a library's import


def test_an_output_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    said = start(tmp_path, ROOT / "polar_trl" / "configs" / "tasks" / "shell_ladder.jsonl")
    assert said[1:] == [f"train: output_dir {tmp_path / 'run'} is a file; name another output_dir"]


def write_task(folder: Path, toml: str = "", environment: str = "") -> Path:
    """A task folder with hidden tests, and no known solution."""
    for path, text in (
        ("task.toml", f'{toml}\n[environment]\nnetwork_mode = "no-network"\n{environment}'),
        ("instruction.md", "Do it.\n"),
        ("environment/workspace/m.py", ""),
        ("tests/hidden/test_m.py", "def test_m(): assert False\n"),
        ("tests/spec.json", '{"fail_to_pass": ["test_m.py::test_m"], "paths": ["."], "files": ["test_m.py"]}'),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def start(tmp_path: Path, tasks: Path, **keys: object) -> list[str]:
    """The lines that a run which cannot start says."""
    config = tmp_path / "run.yaml"
    settings = {"tasks": tasks, "model_name_or_path": "no/such/model", "use_cpu": True, "bf16": False}
    lines = (f"{name}: {json.dumps(value, default=str)}\n" for name, value in (settings | keys).items())
    config.write_text("".join(lines))
    done = subprocess.run(
        [find_warm_python(), "-m", "polar_trl", "train", str(config), "--output_dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()


def test_an_agent_that_carries_the_answer_along(tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "t", '[metadata]\npackage = "calc"\nfixed_version = "2.0"\n')
    agent = tmp_path / "agent"
    (agent / "site-packages" / "calc-2.0.dist-info").mkdir(parents=True)
    said = start(tmp_path, tasks, agent_command="true", agent_folders=[agent])
    assert said[-1].startswith("train: task 't': its sandbox shows its answer, calc 2.0 (")
    # one that does not is told apart from it by the same check
    (agent / "site-packages" / "calc-2.0.dist-info").rename(agent / "site-packages" / "calc-1.9.dist-info")
    said = start(tmp_path, tasks, agent_command="true", agent_folders=[agent])
    assert "1 tasks have no known solution and are not checked" in said
    assert "no model at 'no/such/model'" in said[-1]


def test_a_dockerfile_that_nothing_is_built_from(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (write_task(tmp_path / "t" / name) / "environment" / "Dockerfile").write_text("FROM python:3.11-slim\n")
    said = start(tmp_path, tmp_path / "t", agent_command="true", sandbox="bwrap")
    unused = [line for line in said if "Dockerfile" in line]
    advice = "give tests.requirements for the tests and agent_files for the agent, or take sandbox: docker"
    assert unused == [f"the Dockerfiles of 2 tasks are not used in bwrap sandboxes: {advice}"]


def test_the_command_that_evaluates() -> None:
    words = ["--config", "run.yaml", "--output_dir", "runs/a", "--agent_files", "a b", "c", "--seed=1"]
    words += ["--output_dir=runs/b", "--model_name_or_path", "m", "--resume_from_checkpoint", "auto"]
    assert format_eval(words, Path("runs/b"), {"": "t.jsonl"}) == (
        "polar-trl eval --config run.yaml --agent_files 'a b' c --seed=1 --model_name_or_path runs/b "
        "--output_dir runs/b-eval"
    )
    assert format_eval(["--config", "run.yaml"], Path("runs/b"), {}, ["pi", "codex"]) == (
        "polar-trl eval --config run.yaml --agent pi --model_name_or_path runs/b --output_dir runs/b-eval"
    )
    words = ["--config", "run.yaml", "--eval_tasks", '{"easy": "a.jsonl", "hard": "b.jsonl"}']
    assert format_eval(words, Path("runs/b"), {"easy": "a.jsonl", "hard": "b.jsonl"}) == (
        "polar-trl eval --config run.yaml --tasks a.jsonl --model_name_or_path runs/b --output_dir runs/b-eval"
    )


def test_a_task_that_the_agent_cannot_be_given(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"id": "a", "instruction": "x", "grader": "true"},
        {"id": "b", "instruction": "x" * 140_000, "grader": "true"},
    ]
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    said = start(tmp_path, tasks, agent_command="agent {instruction}", **keys)
    assert said[-1].startswith("train: task b: the instruction has 140000 bytes") and "{instruction_file}" in said[-1]
    said = start(tmp_path, tasks, agent_command="agent < {instruction_file}", **keys)
    assert "no model at 'no/such/model'" in said[-1]


@pytest.mark.containers
def test_a_task_that_asks_for_more_than_its_sandbox_has(tmp_path: Path) -> None:
    tasks = write_task(tmp_path / "t", environment="memory_mb = 5000\n")
    keys = {"agent_command": "true", "sandbox": "docker", "sandbox_image": "polar-trl-test:latest"}
    said = start(tmp_path, tasks, **keys)
    assert "train: task 't' asks for memory_mb 5000" in said[-1] and "set sandbox_memory_mb to 5000" in said[-1]
