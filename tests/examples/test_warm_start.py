"""Test docs/warm-start.md: a program plays solutions inside Pi, TRL's command trains on them, GRPO goes on."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from datasets import load_dataset
from doc_pages import ROOT, find_blocks, list_lines
from launch import list_warm_programs
from transformers import AutoTokenizer

from polar_trl.configs.small_model import MODEL_NAME
from polar_trl.eval.sample_tasks import read_results
from polar_trl.recording.log import read_record
from polar_trl.tasks.load import load_task_set

PAGE = ROOT / "docs" / "warm-start.md"
COLLECT, SFT, TRAIN, EVAL, MAKE = list_lines("\n".join(find_blocks(PAGE, "bash")))
TWO_STEPS = (
    "--max_steps 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --num_generations 2 "
    "--drop_zero_variance false --entropy_coef 0.01"
)


def run(command: str, folder: Path, model: Path) -> str:
    """Run a command of the page, whose model stands in for SmolLM2: the tokenizer is SmolLM2's."""
    command = command.replace(f"~/.cache/polar-trl/models/{MODEL_NAME}", str(model))
    if command.startswith("polar-trl") and "--model_name_or_path" not in command:
        command += f" --model_name_or_path {model}"
    env = os.environ | {"PATH": list_warm_programs(), "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with positions for Pi's window."""
    folder = tmp_path_factory.mktemp("long") / "tiny"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the first stage, on a task of each kind."""
    folder = tmp_path_factory.mktemp("warm")
    assert "--limit 24" in COLLECT
    run(COLLECT.replace("--limit 24", "--limit 8"), folder, model)
    return folder


def test_every_solution_is_accepted_and_recorded_as_the_model_would_write_it(folder: Path, model: Path) -> None:
    results = read_results(folder / "runs" / "warm")
    assert [result.reward for result in results] == [1.0] * 8
    tokenizer = AutoTokenizer.from_pretrained(model)
    golds = {task.id: task.metadata["gold"] for task in load_task_set("polar_trl:tasks/small_train.jsonl")}
    for result in results:
        first, last = read_record(folder / "runs" / "warm" / result.record).rollout.calls
        arguments = json.dumps({"command": golds[result.task]})
        wanted = f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        assert tokenizer.decode(first.completion.token_ids) == wanted
        # the model's own spelling of that text, and not some ids that read the same
        assert list(first.completion.token_ids) == tokenizer.encode(wanted, add_special_tokens=False)
        assert set(first.completion.logprobs) == {0.0}
        assert tokenizer.decode(last.completion.token_ids) == "Done.<|im_end|>"
    rows = load_dataset(str(folder / "runs" / "warm" / "dataset"), "tokens", cache_dir=str(folder / "cache"))
    assert rows["train"].num_rows == 8 and "the tasks' solutions" in (
        folder / "runs" / "warm" / "dataset" / "README.md"
    ).read_text(encoding="utf-8")


def test_sft_and_then_grpo(folder: Path, model: Path) -> None:
    run(f"{SFT} --max_steps 2 --save_strategy no", folder, model)
    assert (folder / "runs" / "sft" / "model.safetensors").exists()
    run(f"{TRAIN} {TWO_STEPS}", folder, model)
    steps = [json.loads(line) for line in (folder / "runs" / "both" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]
    run(f"{EVAL.replace('--num_samples 2', '--num_samples 1')} --limit 2", folder, model)
    assert len(read_results(folder / "runs" / "both-eval")) == 2


def test_the_generator(tmp_path: Path, model: Path) -> None:
    run(MAKE.replace("--num 96", "--num 12"), tmp_path, model)
    tasks = load_task_set(tmp_path / "hard.jsonl")
    assert sorted({task.metadata["level"] for task in tasks}) == [1, 2, 3]
