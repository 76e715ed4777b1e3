"""Nothing leaves by accident: what a push to the hub would upload, read where huggingface_hub would send it."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer
from huggingface_hub import HfApi, ModelCard
from launch import run_worker
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer

from polar_trl.errors import ConfigError
from polar_trl.grpo.resume.hub import WithModelCard, refuse_uploads

MODEL_FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
}


def test_a_push_has_the_model_its_tokenizer_card_and_figures_and_nothing_else(
    tiny_model: Path, tmp_path: Path
) -> None:
    run_worker("hub_worker.py", str(tiny_model), str(tmp_path / "run"), warm=False)
    commits = json.loads((tmp_path / "run.json").read_text())
    assert len(commits) >= 4  # two checkpoints, the model that was saved, and the one that was pushed
    assert set(commits[-1]) == {*MODEL_FILES, "rewards.png"}
    for commit in commits[:-1]:
        assert set(commit) <= {*MODEL_FILES, "rewards.png"} and "model.safetensors" in commit
    # all of this was there to be taken along
    there = {path.name for path in (tmp_path / "run").iterdir()}
    left = {"sessions", "rows", "completions", "trained.jsonl", "log.jsonl", "settings.json", "training_args.bin"}
    assert left <= there and {"checkpoint-2", "owner.lock"} <= there
    assert "hf_secret" not in (tmp_path / "run" / "settings.json").read_text()
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        card = ModelCard.load(folder / "README.md")
        assert card.data.model_name == "policy" and {"trl", "grpo", "polar-trl"} <= set(card.data.tags)
        assert str(tmp_path) not in card.content and "| Agent | shell |" in card.content
        assert 'from_pretrained("me/policy"' in card.content
    assert "| Steps | 2 of 2 |" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_not_pushed(strategy: str) -> None:
    args = SimpleNamespace(push_to_hub=True, hub_strategy=strategy, report_to=[])
    with pytest.raises(ConfigError, match=r"hub_strategy must be 'end' or 'every_save' .*tokens of sessions"):
        refuse_uploads(args)
    refuse_uploads(SimpleNamespace(push_to_hub=False, hub_strategy=strategy, report_to=[]))


@pytest.mark.parametrize(
    ("tracker", "variable", "bad", "good"),
    [
        ("wandb", "WANDB_LOG_MODEL", "checkpoint", "end"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "TRUE", "0"),
        ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "1", ""),
    ],
)
def test_trackers_get_no_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tracker: str, variable: str, bad: str, good: str
) -> None:
    args = SimpleNamespace(push_to_hub=False, hub_strategy="every_save", report_to=[tracker])
    monkeypatch.setenv(variable, bad)
    with pytest.raises(ConfigError, match=f"{variable}={bad} would upload checkpoints"):
        refuse_uploads(args)
    monkeypatch.setenv(variable, good)
    refuse_uploads(args)


class Pusher(WithModelCard, Trainer):  # type: ignore[misc]
    """As much of a trainer as makes a repository on the hub."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.args: Any = SimpleNamespace(hub_model_id="me/policy", hub_token="hf_secret", hub_private_repo=None)

    def is_world_process_zero(self) -> bool:
        return True


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: HfApi(endpoint=address))
    for is_offline in (True, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        with pytest.raises(ConfigError, match=r"gives no repository 'me/policy' \(.+\); check the network") as raised:
            Pusher(None).init_hf_repo()
        assert "\n" not in str(raised.value)


def test_a_pushed_adapter_of_a_local_base_is_warned_of(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id="me/policy"))
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    Pusher(base).init_hf_repo()
    assert not caplog.records
    Pusher(get_peft_model(base, LoraConfig(target_modules=["q_proj"]))).init_hf_repo()
    assert f"the base is a local folder ({tiny_model}), from which nobody" in caplog.text
    assert "set base_model_name_or_path in its adapter_config.json" in caplog.text
