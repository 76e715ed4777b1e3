"""vLLM's real CPU build and the trainer agree on models with sliding windows, the real Gemma 3 270M among them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_models import WINDOW, build_model
from launch import find_warm_python

from polar_trl.cache import find_cache

ROOT = Path(__file__).resolve().parents[2]


def compare(model: Path, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    (folder / "prompts.json").write_text(json.dumps(prompts))
    command = [find_warm_python(), str(ROOT / "tests/helpers/engine_logps.py"), str(model), "prompts.json", "out.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def assert_equal(found: dict[str, Any], *, nats: float) -> None:
    assert found["chosen"] == "tree"
    engine = np.array(found["engine"])
    assert len(engine) > 40 and engine.std() > 0.3  # no uniform distribution, in which nothing would be seen
    gaps = {name: float(np.abs(engine - found[name]).max()) for name in ("alone", "tree", "packed")}
    assert {name: gap for name, gap in gaps.items() if gap > nats} == {}


@pytest.mark.parametrize("name", ["Mistral"])
def test_a_random_model_with_windows(name: str, tmp_path: Path) -> None:
    model = build_model(name, vocab_size=1000, head_dim=64, hidden_size=64, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    common = rng.integers(10, 1000, size=2 * WINDOW).tolist()
    prompts = [common + rng.integers(10, 1000, size=size).tolist() for size in (3, WINDOW, 3 * WINDOW)]
    assert_equal(compare(tmp_path / "model", prompts, tmp_path), nats=1e-4)


def test_gemma_3_on_prompts_longer_than_its_window(tmp_path: Path) -> None:
    """Its window is 512 tokens; the prompts are this project's own text in Gemma's vocabulary."""
    model = find_cache("models") / "gemma-3-270m"
    assert (model / "model.safetensors").exists(), "run scripts/dev/get_gemma.py first (scripts/test.sh does)"
    ids = json.loads((ROOT / "tests/engine/gemma_ids.json").read_text())
    prompts = [ids[:700], ids[:600] + ids[700:740], ids[:60]]
    found = compare(model, prompts, tmp_path)
    assert_equal(found, nats=1e-3)
    assert np.mean(found["engine"]) > -5  # it reads text: a model that sees noise gives its own samples less
