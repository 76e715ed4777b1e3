"""TRL's SFTTrainer takes what is collected as it is: it trains exactly the sampled tokens, and its loss falls."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from collect_sessions import DONE, Recorder, record_folder
from datasets import DatasetDict, load_dataset
from launch import find_warm_python
from tiny_qwen import build_tiny_qwen3
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from polar_trl.collect.data_set import Selection, build_data_set

ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = DONE.removeprefix("<think>\n").removesuffix("<|im_end|>")


@pytest.fixture(scope="module")
def recorder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    model = build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("model"))
    return record_folder(model, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def target(recorder: Recorder) -> Path:
    folder = recorder.folder / "dataset"
    build_data_set(recorder.folder, folder, Selection(), agent="shell", model="tiny")
    return folder


def train(recorder: Recorder, data: DatasetDict, folder: Path, **settings: Any) -> tuple[SFTTrainer, list[float]]:
    """The trainer after a few steps, and the loss of each."""
    args = SFTConfig(
        output_dir=str(folder),
        max_length=None,
        max_steps=6,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        **settings,
    )
    trainer = SFTTrainer(model=str(recorder.model), args=args, train_dataset=data["train"], eval_dataset=data["test"])
    trainer.train()
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def list_trained(trainer: SFTTrainer) -> dict[tuple[int, ...], list[int]]:
    """Return, by the ids of a sequence, 1 where the loss is computed, as the collator gives them to the model."""
    found: dict[tuple[int, ...], list[int]] = {}
    for batch in trainer.get_train_dataloader():
        for ids, labels, attended in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            length = int(attended.sum())
            assert attended[:length].all()
            assert (labels[length:] == -100).all()
            kept = labels[:length] != -100
            assert (labels[:length][kept] == ids[:length][kept]).all()
            found[tuple(ids[:length].tolist())] = kept.long().tolist()
    return found


def test_tokens_are_trained_exactly_where_they_were_sampled(recorder: Recorder, target: Path, tmp_path: Path) -> None:
    data = load_dataset(str(target), "tokens", cache_dir=str(tmp_path / "cache"))
    trainer, losses = train(recorder, data, tmp_path / "sft")
    test_tasks = set(data["test"]["task_id"])
    expected = {
        tuple(ids): mask
        for result in recorder.results
        if result.reward == 1.0 and result.task not in test_tasks
        for ids, mask in recorder.trajectories(result)
    }
    assert len(expected) == 11  # b0 was accepted twice with the same ids
    assert list_trained(trainer) == expected
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]


def test_messages_are_trained_as_the_template_has_them(recorder: Recorder, target: Path, tmp_path: Path) -> None:
    data = load_dataset(str(target), "messages", cache_dir=str(tmp_path / "cache"))
    trainer, losses = train(recorder, data, tmp_path / "sft", assistant_only_loss=True)
    trained = list_trained(trainer)
    assert len(trained) == 11
    tokenizer = AutoTokenizer.from_pretrained(recorder.model)
    for ids, mask in trained.items():
        text = tokenizer.decode(ids)
        assert '"name": "shell", "description": "Runs a command."' in text  # the tools reached the template
        said = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
        assert LAST_WORDS in said
        assert "notes.txt" not in said  # a tool's result
        assert ("Go on." in text) == ('{"command": "ls"}' not in said)
    assert losses[-1] < 0.5 * losses[0]


def test_the_block_of_the_docs_runs(recorder: Recorder, target: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "collect.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    changes = {
        '"runs/collect/dataset"': repr(str(target)),
        '"Qwen/Qwen3-4B"': repr(str(recorder.model)),
        '"runs/sft"': repr(str(tmp_path / "sft")),
        "num_train_epochs=2": "max_steps=1, use_cpu=True, bf16=False, report_to='none', save_strategy='no'",
    }
    for before, after in changes.items():
        assert block.count(before) == 1
        block = block.replace(before, after)
    done = subprocess.run([find_warm_python(), "-c", block], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'train_loss'" in done.stdout


def test_a_split_that_is_not_there_is_none(recorder: Recorder, tmp_path: Path) -> None:
    build_data_set(recorder.folder, tmp_path / "set", Selection(test_share=0.0), agent="shell", model="tiny")
    data = load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))  # tokens, where no form is named
    assert data.get("test") is None
    assert data["train"].column_names[:2] == ["input_ids", "assistant_masks"]
