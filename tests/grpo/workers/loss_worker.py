"""Loss and gradient of the same rollouts, cut, laid out and spread in several ways: `loss_worker.py OUT KIND`.

Under one process or several. "layouts" writes OUT/layouts-<world size>.pt on rank 0: (architecture, layout, loss type,
parts per rollout, tokens per pass) -> (loss, gradient), the same for other numbers of micro-steps per generation; on
one process also (architecture, "trl", loss type), TRL's own trainer on one padded batch, and (architecture, layout) ->
log-probabilities of all trained tokens. "table" writes OUT/table-<world size>.pt: (number of a case of
`loss_table.CASES`, parts per rollout or "trl") -> (loss, gradient, logged figures).
"""

import os
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from loss_table import CASES, build_case_settings
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
from trl import GRPOConfig, GRPOTrainer
from trl_padded import build_padded_batch

from polar_trl.grpo.config import LOSS_TYPES, PackedGRPOConfig
from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.rows import Row, build_row
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.reconstruct.truncate import take_calls
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout

NUM_ROLLOUTS, NUM_CALLS, VOCAB = 8, 7, 200
LAYOUTS = ("tree", "packed", "single")
SPLITS = ((1, 10_000), (1, 200), (2, 90), (7, 200))
"""Parts per rollout, and most tokens of a forward pass."""
TABLE_SPLITS = ((2, 10_000), (7, 150))
"""The same, of the cases of the table."""
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
    """What TRL wants to see; no text is ever encoded."""
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
    """A session of growing conversation, with spans of uneven length; pairs of rollouts share how they begin."""
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
        for first, end in pairwise(edges):
            rows.append(build_row(take_calls(whole, rollout, first, end), advantages[number]))
    return rows


class PresetRows(PackedGRPOTrainer):
    """Trains the rows that it is given."""

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


def train_ours(
    trainer: PresetRows, loss_type: str, numbers: range, parts: int, max_tokens: int, per_generation: int = 2
) -> Any:
    """Loss and gradient of an optimizer step (two micro-steps), as the mean over ranks that DDP makes.

    Where a generation feeds several optimizer steps, the mean over them; where it takes several generations to feed
    one, each of them has the same rows.
    """
    trainer.args.steps_per_generation = per_generation
    trainer.args.loss_type = loss_type
    trainer.args.max_tokens_per_device = max_tokens
    trainer.preset = build_rows(numbers, parts)
    trainer.step.windows, trainer._step = None, 0
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.zero_grad()
    num_micro_steps = max(per_generation, trainer.args.gradient_accumulation_steps)
    num_updates = num_micro_steps // trainer.args.gradient_accumulation_steps
    loss = sum(trainer.training_step(trainer.model, [{}]) for _ in range(num_micro_steps))
    assert isinstance(loss, torch.Tensor)
    loss = loss / num_updates
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]) / num_updates
    gradient = trainer.accelerator.reduce(gradient, reduction="mean")
    return trainer.accelerator.reduce(loss, reduction="mean").item(), gradient.clone()


def train_generations(trainer: PresetRows, numbers: range, kept: tuple[int, int]) -> Any:
    """Loss and gradient of a step that two generations feed: each of half of the rollouts, of which the range `kept`
    has rows."""
    halves = [[number for number in numbers if number in half] for half in (range(4), range(4, NUM_ROLLOUTS))]
    generations = [build_rows([n for n in half if n in range(*kept)], 2) for half in halves]
    trainer.args.steps_per_generation, trainer.args.loss_type = 1, "dapo"
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.step.windows, trainer._step = None, 0
    trainer.model.zero_grad()
    loss = 0.0
    for trainer.preset in generations:
        loss += trainer.training_step(trainer.model, [{}])
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    gradient = trainer.accelerator.reduce(gradient, reduction="mean")
    return trainer.accelerator.reduce(loss, reduction="mean").item(), gradient.clone()


def evaluate_ours(trainer: PresetRows, loss_type: str, numbers: range) -> float:
    """Loss of an evaluation batch, as the mean over ranks that transformers logs."""
    trainer.args.loss_type = loss_type
    trainer.preset = build_rows(numbers, 2)
    trainer.model.eval()
    loss, _, _ = trainer.prediction_step(trainer.model, [{}], True)
    return trainer.accelerator.reduce(loss, reduction="mean").item()


def train_nothing(trainer: PresetRows) -> tuple[float, float]:
    """Losses of a step and of an evaluation in which no rank has a row."""
    trainer.preset, trainer.step.windows, trainer._step = [], None, 0
    trainer.model.eval()
    evaluated, _, _ = trainer.prediction_step(trainer.model, [{}], True)
    trained = sum(trainer.training_step(trainer.model, [{}]) for _ in range(trainer.args.steps_per_generation))
    return float(trained), evaluated.item()


def score_ours(trainer: PresetRows) -> torch.Tensor:
    """[S] log-probabilities of all trained tokens, row by row."""
    rows = build_rows(range(NUM_ROLLOUTS), 1)
    parts = [[row] for row in rows] if trainer.layout_kind == "single" else [rows]
    scored = []
    for part in parts:
        ones = [1] * len(part)
        batch = build_micro_batch(part, ones, ones, kind=trainer.layout_kind, device=torch.device("cpu"))
        with torch.no_grad():
            scored.append(trainer._score(trainer.model, batch)[0][batch["completion_mask"].bool()])
    return torch.cat(scored)


def score_padded(trainer: GRPOTrainer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].size(1))[0]


def train_trl(trainer: GRPOTrainer, settings: dict[str, Any], old: Any = None, reference: Any = None) -> Any:
    """Loss, gradient and log-probabilities by TRL, on one batch in which each rollout is one row.

    Args:
        old: State of the model when the rollouts came to be trained, if it has moved since.
        reference: That of the reference model.
    """
    rows = build_rows(range(NUM_ROLLOUTS), 1)
    apply_settings(trainer, settings)
    batch = build_padded_batch(rows, [1.0] * len(rows))
    batch["num_items_in_batch"] = batch["tool_mask"].sum()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.zero_grad()
    trainer.model.train()
    logps = present = score_padded(trainer, batch)
    now = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    for key, state in (("old_per_token_logps", old), ("ref_per_token_logps", reference)):
        if state is not None:
            trainer.model.load_state_dict(state)
            batch[key] = score_padded(trainer, batch)
    trainer.model.load_state_dict(now)
    logps = batch.get("old_per_token_logps", present)
    # as TRL's _generate_and_score_completions does
    gap = (logps - batch["sampling_per_token_logps"]) * batch["tool_mask"]
    mode = trainer.args.vllm_importance_sampling_mode
    ratio = (gap.sum(dim=-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    low, high = trainer.args.vllm_importance_sampling_clip_min, trainer.args.vllm_importance_sampling_clip_max
    if mode.endswith("truncate"):
        ratio = ratio.clamp(low, high)
    else:
        ratio = ratio.masked_fill((ratio > high) | (ratio < (0.0 if low is None else low)), 0.0)
    if trainer.args.vllm_importance_sampling_correction:
        batch["importance_sampling_ratio"] = ratio
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return loss.item(), gradient.clone(), present[batch["tool_mask"].bool()]


def apply_settings(trainer: Any, settings: dict[str, Any]) -> None:
    """Give a trainer other settings than it was built with: TRL reads some from its arguments, some from itself."""
    for name, value in settings.items():
        setattr(trainer.args, name, value)
        if hasattr(trainer, name):
            setattr(trainer, name, value)
    trainer.epsilon_low = trainer.args.epsilon
    trainer._entropy_bonus_enabled = trainer.args.entropy_coef != 0.0 or trainer.args.use_adaptive_entropy
    trainer._last_world_entropy = 0.0  # below every target
    trainer.use_vllm = True  # the loss is to read the importance ratio


def move_weights(model: Any, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)


def build_table_model(out: Path) -> str:
    """A folder with a model whose log-probabilities are far from alike: the reference model is loaded from it."""
    model = build_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2)
    model.save_pretrained(out)
    return str(out)


def train_again(trainer: PresetRows, old: Any, new: Any) -> Any:
    """Loss, gradient and figures of the step after `old` became `new`, on rollouts that were collected before."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.load_state_dict(old)
    trainer.step.windows = trainer.step.plan(trainer.preset, "train")
    policy.load_state_dict(new)
    trainer.model.zero_grad()
    trainer._step = (trainer.num_iterations - 1) * trainer.args.steps_per_generation
    loss = sum(trainer.training_step(trainer.model, [{}]) for _ in range(trainer.args.gradient_accumulation_steps))
    assert isinstance(loss, torch.Tensor)
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    gradient = trainer.accelerator.reduce(gradient, reduction="mean")
    return trainer.accelerator.reduce(loss, reduction="mean").item(), gradient.clone(), take_figures(trainer)


def run_table(out: Path, common: dict[str, Any]) -> dict[Any, Any]:
    """Every case of the table, by TRL on one process, and by ours for each split."""
    rank = int(os.environ.get("RANK", 0))
    folder = build_table_model(out / f"table-{rank}")
    settings: dict[str, Any] = {**build_settings(out), "beta": 0.1, "model_init_kwargs": {"dtype": "float32"}}
    trainer = PresetRows(model=folder, args=PackedGRPOConfig(**settings), **common)
    world = trainer.accelerator.num_processes
    stock = GRPOTrainer(model=folder, args=GRPOConfig(**settings), **common) if world == 1 else None
    reference = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    move_weights(trainer.model, 5, 0.02)
    old = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    move_weights(trainer.model, 6, 0.02)
    new = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    share = range(rank * NUM_ROLLOUTS // world, (rank + 1) * NUM_ROLLOUTS // world)
    results: dict[Any, Any] = {}
    for number, case in enumerate(CASES):
        if number % {1: 1, 2: 3, 4: 13}[world]:
            continue  # several processes are slow
        settings = build_case_settings(case)
        for parts, max_tokens in TABLE_SPLITS if number % 4 == 0 else TABLE_SPLITS[1:]:
            apply_settings(trainer, settings)
            trainer.args.max_tokens_per_device, trainer.preset = max_tokens, build_rows(share, parts)
            results[number, parts] = train_again(trainer, old if case.is_off_policy else new, new)
        if stock is not None:
            stock.model.load_state_dict(new)
            is_penalised = settings["beta"] > 0
            found = train_trl(
                stock, settings, old if case.is_off_policy else None, reference if is_penalised else None
            )
            results[number, "trl"] = (*found[:2], take_figures(stock))
    return results


def take_figures(trainer: Any) -> dict[str, float]:
    """What waits to be logged, as it would be."""
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    trainer._metrics["train"].clear()
    return metrics


def run_layouts(out: Path, common: dict[str, Any]) -> dict[Any, Any]:
    """Every layout of every architecture, with the losses as they come."""
    results: dict[Any, Any] = {}
    for architecture in ("llama", "qwen3", "qwen3_5"):
        for layout in LAYOUTS:
            trainer = PresetRows(
                model=build_model(architecture),
                args=PackedGRPOConfig(**build_settings(out), sequence_layout=layout),
                **common,
            )
            trainer.use_vllm = True  # the loss is to read the importance ratio
            rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
            share = range(rank * NUM_ROLLOUTS // world, (rank + 1) * NUM_ROLLOUTS // world)
            # one of each way to divide is enough beyond the first architecture and for several processes
            loss_types = LOSS_TYPES if architecture == "llama" and world == 1 else LOSS_TYPES[: 2 if world > 2 else 3]
            for loss_type in loss_types:
                for parts, max_tokens in SPLITS:
                    key = (architecture, layout, loss_type, parts, max_tokens)
                    results[key] = train_ours(trainer, loss_type, share, parts, max_tokens)
                results[architecture, layout, loss_type, "evaluation"] = evaluate_ours(trainer, loss_type, share)
                for per_generation in (1, 4):
                    key = (architecture, layout, loss_type, "micro-steps per generation", per_generation)
                    results[key] = train_ours(trainer, loss_type, share, 2, 200, per_generation)
            results[architecture, layout, "nothing"] = train_nothing(trainer)
            if (architecture, layout) == ("llama", "tree"):
                results["generations"] = [train_generations(trainer, share, kept) for kept in ((0, 8), (0, 4), (4, 8))]
            if world == 1:
                results[architecture, layout] = score_ours(trainer)
        if world == 1:
            stock = GRPOTrainer(model=build_model(architecture), args=GRPOConfig(**build_settings(out)), **common)
            for loss_type in loss_types:
                settings = {"loss_type": loss_type, "vllm_importance_sampling_mode": "token_truncate"}
                results[architecture, "trl", loss_type] = train_trl(stock, settings)
    return results


def main(out: Path, kind: str) -> None:
    common: dict[str, Any] = {
        "reward_funcs": lambda **_: [0.0],
        "processing_class": build_tokenizer(),
        "train_dataset": Dataset.from_dict({"prompt": ["x"] * 8}),
    }
    results = run_table(out, common) if kind == "table" else run_layouts(out, common)
    state = PartialState()
    if state.is_main_process:
        torch.save(results, out / f"{kind}-{state.num_processes}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
