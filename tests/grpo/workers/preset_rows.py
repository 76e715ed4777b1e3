"""Build tiny models, rows of fixed rollouts and a trainer of such rows, for the workers that need no engine."""

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.rows import Row, build_row
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.reconstruct.truncate import take_calls
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout

NUM_ROLLOUTS, NUM_CALLS, VOCAB = 8, 7, 200
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer that TRL wants to see; no text is ever encoded."""
    vocabulary = {str(index): index for index in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="0", eos_token="1")


def build_model(architecture: str) -> Any:
    torch.manual_seed(3)
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES))
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **HYBRID))


def build_rollout(seed: int) -> Rollout:
    """Build a session of growing conversation, with spans of uneven length; pairs of rollouts share how they begin."""
    common, rng = random.Random(seed // 2), random.Random(seed)
    ids: tuple[int, ...] = tuple(common.randrange(3, VOCAB) for _ in range(12))
    calls = []
    for index in range(NUM_CALLS):
        # the first answers of a pair begin alike, so that trained tokens are shared too
        sampled = (5, 6) if index == 0 else ()
        sampled += tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9)))
        calls.append(
            Call(
                session_id=f"r{seed}",
                index=index,
                dialect="openai_chat",
                request=ChatRequest(messages=(Message(role="user", text="x"),)),
                prompt_ids=ids,
                completion=Completion(
                    token_ids=sampled,
                    logprobs=tuple(-rng.uniform(5.0, 5.6) for _ in sampled),
                    finish_reason="stop",
                ),
                message=Message(role="assistant", text="y"),
            )
        )
        ids = ids + sampled + tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 6)))
    return Rollout(id=f"r{seed}", task_id="t", group_id="g", calls=tuple(calls), reward=1.0)


def build_rows(numbers: Iterable[int], parts: int) -> list[Row]:
    rng = random.Random(1)
    advantages = [rng.uniform(-2, 2) for _ in range(NUM_ROLLOUTS)]
    rows = []
    for number in numbers:
        rollout = build_rollout(number)
        (whole,) = build_prefix_merged(rollout).trajectories
        num_calls = len(whole.call_indices)
        num_parts = min(parts, num_calls)
        edges = [part * num_calls // num_parts for part in range(num_parts + 1)]
        rows += [build_row(take_calls(whole, rollout, *edge), advantages[number]) for edge in pairwise(edges)]
    return rows


class PresetRows(PackedGRPOTrainer):
    """Train the rows of `preset`."""

    preset: list[Row]

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        return self.preset


def build_settings(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "max_completion_length": 64,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def build_common() -> dict[str, Any]:
    """Build what every trainer of preset rows is given beside its model and its arguments."""
    return {
        "reward_funcs": lambda **_: [0.0],
        "processing_class": build_tokenizer(),
        "train_dataset": Dataset.from_dict({"prompt": ["x"] * 8}),
    }


def share_rollouts(trainer: Any) -> range:
    """Return the numbers of this rank's rollouts."""
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    return range(rank * NUM_ROLLOUTS // world, (rank + 1) * NUM_ROLLOUTS // world)
