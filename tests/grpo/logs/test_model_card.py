"""The card of a saved model: the hub reads its head, people its figures, and nobody a path of the machine."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from polar_trl.grpo.logs.model_card import build_card, build_merged_card

SETTINGS: dict[str, Any] = {
    "model": "Qwen/Qwen3-4B",
    "agent": "pi",
    "agent_version": "1.6.0",
    "num_tasks": 293,
    "num_eval_tasks": 40,
    "max_steps": 8,
    "arguments": {"tasks": "/home/me/work/tasks|1.jsonl", "learning_rate": 1e-6, "use_peft": True, "lora_r": 16},
    "starts": [{"versions": {"trl": "1.16.0"}, "hardware": {"cpus": 16, "gpus": ["H200, 139 GiB"] * 2}}],
}
TOKENS = {"polar/sampled_tokens": 1000, "polar/trained_tokens": 900}
RATES = {"eval_pass_rate": 0.5, "eval_pass_rate_low": 0.36, "eval_pass_rate_high": 0.64}
LOG = [
    *({"step": step, "reward": step / 10} | TOKENS for step in range(1, 9)),
    {"step": 0, "eval_reward": 0.25, "eval_graded": 48.0, "eval_solved": 12.0, "eval_runtime": 9.0, **RATES},
    {"step": 8, "eval_reward": 0.5, "eval_graded": 48.0, "eval_solved": 24.0, "eval_runtime": 9.0, **RATES},
    {"step": 8, "eval_hard_reward": 0.1, "eval_hard_graded": 0.0, "eval_hard_solved": 0.0, "eval_hard_runtime": 1.0},
]


def read(settings: dict[str, Any] = SETTINGS, log: Any = LOG, **fields: Any) -> ModelCard:
    values: dict[str, Any] = {"name": "policy", "seconds": 7200.0, "tags": ["trl"]} | fields
    return ModelCard(build_card(settings, log, **values))


def test_the_head_is_what_the_hub_reads() -> None:
    data = read(is_adapter=True).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("Qwen/Qwen3-4B", "peft", "text-generation")
    assert set(data.tags) == {"trl", "polar-trl", "agent"} and data.license is None
    assert read().data.library_name == "transformers"


@pytest.mark.parametrize(
    "line",
    [
        "| Agent | pi 1.6.0 |",
        "| Tasks | tasks\\|1.jsonl (293 for training, 40 for evaluation) |",
        "| Steps | 8 of 8 |",
        "| Reward of the first and last quarter of the steps | 0.15, 0.75 |",
        "| First evaluation | reward 0.25 at step 0, solved 12 of 48 (50 %",
        "| Last evaluation | reward 0.5 at step 8, solved 24 of 48 (50 %, 95 % interval 36-64 %) |",
        "| Evaluation of hard | reward 0.1 at step 8, solved none (no session has a reward) |",
        "| Tokens | 8,000 sampled, 7,200 of them trained |",
        "| Training | 2.0 hours on 2 x H200, 139 GiB |",
        "`learning_rate: 1e-06`, `lora_r: 16`.",
        "trl 1.16.0",
        "inside the coding agent pi 1.6.0",
    ],
)
def test_the_figures(line: str) -> None:
    assert line in read().content


def test_no_path_of_this_machine_is_in_it() -> None:
    card = read(SETTINGS | {"model": "/home/me/models/base"})
    assert "/home" not in card.content and "| Base model | base |" in card.content and card.data.base_model is None


def test_before_a_step_there_is_a_card_without_figures() -> None:
    card = read({"model": "base", "agent": "shell"}, [])
    assert "Reward" not in card.content and "inside a coding agent" in card.content


def test_one_minute_is_one() -> None:
    assert "| Training | 1 minute on" in read(seconds=61.0).content
    assert "| Training | 2 minutes on" in read(seconds=119.0).content


def test_it_says_how_to_load_the_model_from_where_it_is_pushed() -> None:
    adapter = read(is_adapter=True, hub_id="me/policy").content
    assert (
        "polar-trl serve me/policy\n" in adapter and 'AutoPeftModelForCausalLM.from_pretrained("me/policy"' in adapter
    )
    assert "pip install polar-trl" not in adapter and "MODEL" not in adapter
    assert 'AutoModelForCausalLM.from_pretrained("MODEL"' in read().content
    assert "That of the base model, [Qwen/Qwen3-4B](" in adapter


def test_a_base_in_a_relative_folder_has_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sft").mkdir(parents=True)
    card = read(SETTINGS | {"model": "runs/sft"})
    assert card.data.base_model is None and "| Base model | sft |" in card.content


def test_a_merged_model_has_the_card_of_a_whole_one() -> None:
    assert build_merged_card(read(is_adapter=True, hub_id="me/policy").content) == read().content
    assert build_merged_card("---\ntags:\n- lora\n---\nOf another trainer.\n") is None
    assert build_merged_card("---\na: [\n---\n") is None
    assert build_merged_card("no head") is None
