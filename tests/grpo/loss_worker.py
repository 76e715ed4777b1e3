"""Loss and gradient of the same rollouts, cut, laid out and spread in several ways: `loss_worker.py OUT`.

Under one process or several. Writes OUT/losses-<world size>.pt on rank 0: (architecture, layout, loss type, parts per
rollout, tokens per pass) -> (loss, gradient), the same for other numbers of micro-steps per generation; on one process
also (architecture, "trl", loss type), TRL's own trainer on one padded batch, and (architecture, layout) ->
log-probabilities of all trained tokens.
"""

import random
import sys
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
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from trl_padded import build_padded_batch

from polar_trl.grpo.batch import build_micro_batch
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.rows import Row, build_row, row_weights
from polar_trl.reconstruct.cut import cut_trajectory
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout

NUM_ROLLOUTS, NUM_CALLS, VOCAB = 8, 7, 200
LAYOUTS = ("tree", "packed", "single")
SPLITS = ((1, 10_000), (1, 200), (2, 90), (7, 200))
"""Parts per rollout, and most tokens of a forward pass."""
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")
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


def build_rows(numbers: range, parts: int) -> list[Row]:
    rng = random.Random(1)
    advantages = [rng.uniform(-2, 2) for _ in range(NUM_ROLLOUTS)]
    rows = []
    for number in numbers:
        rollout = build_rollout(number)
        (whole,) = build_prefix_merged(rollout).trajectories
        rows += [build_row(t, advantages[number]) for t in cut_trajectory(whole, rollout, parts)]
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
    trainer.loss_type = loss_type
    trainer.args.max_tokens_per_device = max_tokens
    trainer.preset = build_rows(numbers, parts)
    trainer._windows, trainer._step = None, 0
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


def evaluate_ours(trainer: PresetRows, loss_type: str, numbers: range) -> float:
    """Loss of an evaluation batch, as the mean over ranks that transformers logs."""
    trainer.loss_type = loss_type
    trainer.preset = build_rows(numbers, 2)
    trainer.model.eval()
    loss, _, _ = trainer.prediction_step(trainer.model, [{}], True)
    return trainer.accelerator.reduce(loss, reduction="mean").item()


def train_nothing(trainer: PresetRows) -> tuple[float, float]:
    """Losses of a step and of an evaluation in which no rank has a row."""
    trainer.preset, trainer._windows, trainer._step = [], None, 0
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
        batch = build_micro_batch(
            part,
            [1.0] * len(part),
            num_rows=len(part),
            kind=trainer.layout_kind,
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            scored.append(trainer._score(trainer.model, batch)[0][batch["completion_mask"].bool()])
    return torch.cat(scored)


def train_trl(trainer: GRPOTrainer, loss_type: str) -> Any:
    """Loss, gradient and log-probabilities by TRL, on whole trajectories in one batch."""
    rows = build_rows(range(NUM_ROLLOUTS), 1)
    trainer.loss_type, trainer.use_vllm = loss_type, True
    weights = row_weights(rows, loss_type=loss_type)
    scale = len(rows) if weights[0] != 1.0 else 1.0
    batch = build_padded_batch(rows, [weight * scale for weight in weights])
    batch["num_items_in_batch"] = batch["tool_mask"].sum()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.zero_grad()
    trainer.model.train()
    with torch.no_grad():
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].size(1))
        ratio = ((logps[0] - batch["sampling_per_token_logps"]) * batch["tool_mask"]).exp()
    batch["importance_sampling_ratio"] = ratio.clamp(max=trainer.vllm_importance_sampling_clip_max)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return loss.item(), gradient.clone(), logps[0][batch["tool_mask"].bool()]


def main(out: Path) -> None:
    results = {}
    common: dict[str, Any] = {
        "reward_funcs": lambda **_: [0.0],
        "processing_class": build_tokenizer(),
        "train_dataset": Dataset.from_dict({"prompt": ["x"] * 8}),
    }
    for architecture in ("llama", "qwen3", "qwen3_5"):
        for layout in LAYOUTS:
            trainer = PresetRows(
                model=build_model(architecture),
                args=PackedGRPOConfig(
                    **build_settings(out), sequence_layout=layout, vllm_importance_sampling_mode="token_truncate"
                ),
                **common,
            )
            trainer.use_vllm = True  # the loss is to read the importance ratio
            rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
            share = range(rank * NUM_ROLLOUTS // world, (rank + 1) * NUM_ROLLOUTS // world)
            # one of each way to divide is enough for several processes, which are slow
            for loss_type in LOSS_TYPES if world == 1 else LOSS_TYPES[:3]:
                for parts, max_tokens in SPLITS:
                    key = (architecture, layout, loss_type, parts, max_tokens)
                    results[key] = train_ours(trainer, loss_type, share, parts, max_tokens)
                results[architecture, layout, loss_type, "evaluation"] = evaluate_ours(trainer, loss_type, share)
                for per_generation in (1, 4):
                    key = (architecture, layout, loss_type, "micro-steps per generation", per_generation)
                    results[key] = train_ours(trainer, loss_type, share, 2, 200, per_generation)
            results[architecture, layout, "nothing"] = train_nothing(trainer)
            if world == 1:
                results[architecture, layout] = score_ours(trainer)
        if world == 1:
            stock = GRPOTrainer(model=build_model(architecture), args=GRPOConfig(**build_settings(out)), **common)
            for loss_type in LOSS_TYPES:
                results[architecture, "trl", loss_type] = train_trl(stock, loss_type)
    if rank == 0:
        torch.save(results, out / f"losses-{world}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
