"""A run in which everything is in TRL's own form: data, rewards, evaluation sets and their metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_worker
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from polar_trl.run_folder import read_log


@pytest.fixture(scope="module")
def reward_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random sequence classification model with one label."""
    folder = tmp_path_factory.mktemp("models") / "tiny-judge"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        pad_token_id=2,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tiny_model: Path, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stock")
    run_worker("stock_worker.py", str(tiny_model), str(reward_model), str(out))
    return out


def load(run: Path) -> dict[str, Any]:
    return json.loads((run / "result.json").read_text())


def test_reward_functions_get_text_for_text_and_the_data_sets_columns(run: Path) -> None:
    result = load(run)
    assert result["kinds"] == ["str"]
    levels, answers = result["columns"]
    assert len(levels) == 4 and len(set(levels)) == 1 and re.fullmatch(r"train\d", answers[0])
    assert result["metadata"] == {"level": levels[0], "answer": answers[0]}


def test_functions_paths_and_models_give_the_weighted_reward(run: Path) -> None:
    assert load(run)["names"] == ["length", "later", "constant", "tiny-judge"]
    for line in read_log(run):
        if "reward" in line:
            parts = [line[f"rewards/{name}/mean"] for name in load(run)["names"]]
            expected = parts[0] + 0.5 * parts[1] + 0.25 * parts[3]
            assert line["reward"] == pytest.approx(expected, abs=1e-4)
            assert line["rewards/constant/mean"] == 1.0 and line["longest"] > 0


def test_each_evaluation_set_has_its_own_metrics_and_lines(run: Path) -> None:
    for name in ("easy", "hard"):
        lines = [line for line in read_log(run) if f"eval_{name}_reward" in line]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(f"eval_{name}_longest" in line and "eval_reward" not in line for line in lines)
        assert len(list(run.glob(f"completions/eval_{name}_*.parquet"))) == 3
    sessions = list(run.glob("sessions/*/eval_00001/*.jsonl"))
    assert len(sessions) == 4  # two tasks, num_generations_eval=2


def test_the_best_model_by_a_sets_reward_is_loaded_and_reaches_the_engine(run: Path) -> None:
    result = load(run)
    rewards = {line["step"]: line["eval_hard_reward"] for line in read_log(run) if "eval_hard_reward" in line}
    assert result["best"] == f"checkpoint-{max(rewards, key=lambda step: rewards[step])}" and result["is_best"]
    assert result["others"]["eval_other_sampling/sampling_logp_difference/max"] < 1e-3
    assert "eval_other_reward" in result["others"]


def test_the_reference_model_follows(run: Path) -> None:
    assert load(run)["reference_moved"] > 1e-4
