"""A task to a gradient through real parts: Pi in Docker, a bug of a PyPI release, hidden tests, vLLM, TRL."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import docker
import pytest
from launch import find_warm_python, run_worker
from records import read_session
from tiny_qwen import build_tiny_qwen3

from polar_trl.sandbox.docker.backend import LABEL

pytestmark = pytest.mark.containers

ROOT = Path(__file__).parents[2]
TASK = "xmltodict-0.14.1-to-0.14.2"


def test_one_step_on_a_real_bug(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_qwen3(smollm2, tmp_path / "tiny-qwen3")
    tasks, out = tmp_path / "tasks", tmp_path / f"pypi-{os.getpid()}"  # the run's name in the engine
    build = [find_warm_python(), str(ROOT / "scripts" / "build_pypi_tasks.py"), "--out", str(tasks), "--only", TASK]
    subprocess.run(build, check=True, timeout=600)
    out.mkdir()
    with tempfile.TemporaryDirectory(prefix="pypi-") as folder:  # sandboxes of its own, with short paths
        monkeypatch.setenv("TMPDIR", folder)
        run_worker("pypi_worker.py", str(model), str(out), str(tasks))
        assert [list(root.iterdir()) for root in Path(folder).glob("polar-trl-*")] == [[]]

    result = json.loads((out / "result.json").read_text())
    (step,) = [entry for entry in result["log"] if "reward" in entry]
    assert result["moved"] > 0
    assert step["rewards/grader/mean"] == 0.0, "noise cannot have fixed it"
    assert step["polar/rollouts_without_reward"] == 0
    assert step["polar/sampled_tokens"] == step["polar/trained_tokens"] > 0
    assert step["grad_norm"] > 0
    rollouts = [read_session(path) for path in out.glob("sessions/**/*.jsonl")]
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout.calls and rollout.reward == 0.0 and rollout.error is None
        assert any(tool.name == "bash" for tool in rollout.calls[0].request.tools), "these are Pi's own tools"
    assert docker.from_env().api.containers(all=True, filters={"label": f"{LABEL}={out.name}"}) == []
