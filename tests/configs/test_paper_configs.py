"""Run the paper's run files end to end in miniature: real agents in containers, real bugs, one step each.

What is laid over them is in miniature.txt; the model is Qwen3.5's published class, tiny and random.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python, launch_ranks
from records import read_session
from tiny_paper_model import build_tiny_paper_model

from polar_trl.cli import main
from polar_trl.harness import AGENTS

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("xmltodict-0.14.1-to-0.14.2", "parse-1.22.0-to-1.22.1")
DIALECTS = {"codex": "openai_responses", "claude_code": "anthropic", "qwen_code": "openai_chat", "pi": "openai_chat"}
LEAST_PROMPT_TOKENS = {"codex": 8000, "claude_code": 10000, "qwen_code": 15000, "pi": 1500}
"""With the agents' own prompts. A short prompt, or a wrong agent, would be far below."""


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_paper_model(smollm2, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    build = [find_warm_python(), "scripts/build_pypi_tasks.py", "--out", str(out), "--only", *TASKS]
    subprocess.run(build, check=True, timeout=600, cwd=ROOT)
    return out


def read_overrides() -> list[str]:
    """Read what `$(grep -v '^#' tests/configs/miniature.txt)` gives."""
    lines = Path(__file__).with_name("miniature.txt").read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def launch(config: str, model: Path, tasks: Path, out: Path, *more: str) -> dict[str, Any]:
    """Run one step; return its line of log.jsonl."""
    python = find_warm_python()
    done = subprocess.run(
        [
            *(python, "-m", "accelerate.commands.launch", "--no_python", python, "scripts/train.py"),
            *("--config", config, "--model_name_or_path", str(model)),
            *("--tasks", str(tasks), "--output_dir", str(out), *read_overrides(), *more),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (step,) = [entry for entry in entries if "loss" in entry]
    return step


@pytest.mark.containers
@pytest.mark.parametrize(
    ("agent", "kind"), [*((agent, "8gpu") for agent in DIALECTS), ("pi", "1gpu")], ids=lambda value: value
)
def test_one_step_in_miniature(
    agent: str, kind: str, model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    step = launch(f"swe_{kind}", model, tasks, out, "--agent", agent)

    assert step["step"] == 1
    assert step["rewards/grader/mean"] == 0.0, "noise cannot have fixed it"
    assert step["polar/rollouts_without_reward"] == 0, "hidden tests graded every session"
    dropped = sum(value for name, value in step.items() if name.startswith("polar/dropped/"))
    assert step["polar/trained_tokens"] + dropped == step["polar/sampled_tokens"]
    assert step["polar/trained_tokens"] > 0
    assert step["grad_norm"] > 0
    # the engine computes in bfloat16 on a CPU, the trainer in float32
    assert step["sampling/sampling_logp_difference/mean"] < 0.05
    assert step["sampling/sampling_logp_difference/max"] < 0.3
    assert step["learning_rate"] == (1e-6 if kind == "8gpu" else 1e-5)

    rollouts = [read_session(path) for path in sorted(out.glob("sessions/**/*.jsonl"))]
    assert sorted(rollout.task_id for rollout in rollouts) == sorted(TASKS * 2)
    for rollout in rollouts:
        assert rollout.calls and rollout.reward == 0.0 and rollout.error is None
        first = rollout.calls[0]
        assert first.dialect == DIALECTS[agent]
        assert LEAST_PROMPT_TOKENS[agent] < len(first.prompt_ids) < 40_000
        tool = AGENTS[agent]().build_shell_call("true").name
        assert tool in [item.name for item in first.request.tools], "these are the agent's own tools"

    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["trained_tokens"]) == (1, step["polar/trained_tokens"])
    assert main(["replay", str(out), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert (replayed["sessions"], replayed["digests_compared"], replayed["digest_mismatches"]) == (4, 4, 0)
    assert (replayed["steps_compared"], replayed["trained_tokens"]) == (1, step["polar/trained_tokens"])
    assert replayed["rows_compared"] >= 4


def test_fsdp2_shards_the_published_class_and_engines_get_its_weights(model: Path, tmp_path: Path) -> None:
    """Do what eight GPUs do with fsdp2.yaml, on two CPU processes and an easier agent."""
    for result in launch_ranks("fsdp2", tmp_path, "agents", str(model)):
        assert result["distributed_type"] == "FSDP"
        assert result["policy_version"] == 2
        assert result["change"] > 1e-4
        assert result["gap"] < 0.15  # the engine computes in bfloat16


def test_the_overrides_are_those_that_the_docs_show() -> None:
    docs = (ROOT / "docs" / "paper.md").read_text()
    (command,) = re.findall(r"^polar-trl train (?:.*\\\n)*.*miniature\.txt\)$", docs, re.MULTILINE)
    shown = shlex.split(re.sub(r"\$\(.*\)", "OVERRIDES", command.replace("\\\n", " ")))
    assert shown[-1] == "OVERRIDES"
    assert shown[2:5] == ["swe_8gpu", "--agent", "codex"]
    assert shown[5:-1:2] == ["--model_name_or_path", "--tasks", "--output_dir"]
