"""Compute loss and gradient of the same rollouts, cut, laid out and spread in several ways: `loss_worker.py OUT`.

Under one process or several; rank 0 writes OUT/<world size>.pt, a dict of sections whose keys are all alike:

    training     (architecture, layout, loss type) -> name of the split -> (loss, gradient)
    evaluation   (architecture, layout, loss type) -> loss
    nothing      (architecture, layout) -> losses of a step and of an evaluation without rows
    generations  (loss, gradient) of a step fed by two generations, by the first of them, by the second
    table        number of a case of `loss_table.CASES` -> name of the split -> (loss, gradient, logged figures)
    logps        (architecture, layout) -> log-probabilities of all trained tokens              (one process)
    trl          (architecture, loss type) -> (loss, gradient, log-probabilities) of one padded batch, by TRL
    trl_table    number of a case -> (loss, gradient, logged figures), by TRL
    empty_last   of each rank: squared norm of the weights before and after a step whose last generation is empty
    kept         tokens of each prefix that layers kept from pass to pass on rank 0: any of 4 or more tokens
"""

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loss_table import CASES, build_case_settings
from preset_rows import NUM_ROLLOUTS, PresetRows, build_common, build_model, build_rows, build_settings, share_rollouts
from trl import GRPOConfig, GRPOTrainer
from trl_padded import build_padded_batch

from polar_trl.grpo.config import LOSS_TYPES, PackedGRPOConfig
from polar_trl.grpo.packing import prefix
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.rows import Row

LAYOUTS = ("tree", "packed", "single")
SPLITS = ((1, 10_000), (1, 200), (2, 90), (7, 200))
"""Parts per rollout, and most tokens of a forward pass."""
DIVIDED = LOSS_TYPES[:3]
"""One of each way to divide. The other loss types meet the first and the last split, and the cases of the table."""
TABLE_SPLITS = ((2, 10_000), (3, 300))
"""The same, of the cases of the table."""


def list_loss_types(architecture: str, layout: str, world: int) -> tuple[str, ...]:
    """List what is computed: every loss type where it costs least, and one of each way to divide everywhere else.

    Architectures and layouts differ in how a pass is scored, which several ranks do not touch: there, the trees of
    Llama stand for all, beside one loss type in its other layouts and of the hybrid on two ranks.
    """
    if world == 1:
        return {"llama": LOSS_TYPES, "qwen3": DIVIDED[:1], "qwen3_5": DIVIDED}[architecture]
    if (architecture, layout) == ("llama", "tree"):
        return DIVIDED if world == 2 else DIVIDED[:2]
    others = (("llama", "packed"), ("llama", "single"), ("qwen3_5", "tree"))
    return DIVIDED[:1] if world == 2 and (architecture, layout) in others else ()


def read_gradient(trainer: Any) -> torch.Tensor:
    """[P]: the gradient of all weights."""
    return torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


def measure_steps(trainer: PresetRows, generations: Sequence[list[Row]], num_updates: int = 1) -> Any:
    """Compute loss and gradient, as the mean over ranks that DDP makes and the mean over updates.

    Args:
        generations: The rows that a micro-step finds, should it begin a generation.
    """
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.zero_grad()
    loss = torch.zeros(())
    for trainer.preset in generations:
        loss += trainer.training_step(trainer.model, [{}])
    gradient = trainer.accelerator.reduce(read_gradient(trainer) / num_updates, reduction="mean")
    return trainer.accelerator.reduce(loss / num_updates, reduction="mean").item(), gradient.clone()


def train_ours(
    trainer: PresetRows, loss_type: str, numbers: range, parts: int, max_tokens: int, per_generation: int = 2
) -> Any:
    """Compute loss and gradient of an optimizer step (two micro-steps).

    Where a generation feeds several optimizer steps, the mean over them; where it takes several generations to feed
    one, each of them has the same rows.
    """
    trainer.args.steps_per_generation = per_generation
    trainer.args.loss_type, trainer.args.max_tokens_per_device = loss_type, max_tokens
    trainer.step.windows, trainer._step = None, 0
    num_micro_steps = max(per_generation, trainer.args.gradient_accumulation_steps)
    num_updates = num_micro_steps // trainer.args.gradient_accumulation_steps
    return measure_steps(trainer, [build_rows(numbers, parts)] * num_micro_steps, num_updates)


def train_generations(trainer: PresetRows, numbers: range, kept: tuple[int, int]) -> Any:
    """Compute loss and gradient of a step that two generations feed, of which the range `kept` has rows."""
    halves = [[number for number in numbers if number in half] for half in (range(4), range(4, NUM_ROLLOUTS))]
    trainer.args.steps_per_generation, trainer.args.loss_type = 1, "dapo"
    trainer.step.windows, trainer._step = None, 0
    return measure_steps(trainer, [build_rows([n for n in half if n in range(*kept)], 2) for half in halves])


def evaluate_ours(trainer: PresetRows, loss_type: str, numbers: range) -> float:
    """Compute the loss of an evaluation batch, as the mean over ranks that transformers logs."""
    trainer.args.loss_type = loss_type
    trainer.preset = build_rows(numbers, 2)
    trainer.model.eval()
    loss, _, _ = trainer.prediction_step(trainer.model, [{}], True)
    return trainer.accelerator.reduce(loss, reduction="mean").item()


def train_nothing(trainer: PresetRows) -> tuple[float, float]:
    """Return the losses of a step and of an evaluation in which no rank has a row."""
    trainer.preset, trainer.step.windows, trainer._step = [], None, 0
    trainer.model.eval()
    evaluated, _, _ = trainer.prediction_step(trainer.model, [{}], True)
    trained = sum(trainer.training_step(trainer.model, [{}]) for _ in range(trainer.args.steps_per_generation))
    return float(trained), evaluated.item()


class SecondIsEmpty(PresetRows):
    """Train a step of two generations, of which the last has no rows."""

    num_generations_seen = 0

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        self.num_generations_seen += 1
        return build_rows(share_rollouts(self), 1) if self.num_generations_seen == 1 else []


def train_empty_last(out: Path, common: dict[str, Any]) -> list[list[float]]:
    """Return, of each rank, the squared norm of the weights before and after the step."""
    settings = {**build_settings(out), "per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 0.1}
    args = PackedGRPOConfig(**settings, steps_per_generation=1, optim="sgd")
    trainer = SecondIsEmpty(model=build_model("llama"), args=args, **common)

    def total() -> torch.Tensor:
        return sum(((weight.detach().double() ** 2).sum() for weight in trainer.model.parameters()), torch.zeros(()))

    before = total()
    trainer.train()
    return trainer.accelerator.gather(torch.stack([before, total()])[None]).tolist()


def score_ours(trainer: PresetRows) -> torch.Tensor:
    """[S]: log-probabilities of all trained tokens, row by row."""
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
    """Compute loss, gradient and log-probabilities by TRL, on one batch in which each rollout is one row.

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
    present = score_padded(trainer, batch)
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
    return loss.item(), read_gradient(trainer), present[batch["tool_mask"].bool()]


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
    """Save a model whose log-probabilities are far from alike: the reference model is loaded from its folder."""
    model = build_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2)
    model.save_pretrained(out)
    return str(out)


def train_again(trainer: PresetRows, old: Any, new: Any) -> Any:
    """Compute loss, gradient and figures of the step after `old` became `new`, on rollouts collected before."""
    trainer.model.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy.load_state_dict(old)
    trainer.step.windows = trainer.step.pack(trainer.preset, "train")
    policy.load_state_dict(new)
    trainer._step = (trainer.num_iterations - 1) * trainer.args.steps_per_generation
    measured = measure_steps(trainer, [trainer.preset] * trainer.args.gradient_accumulation_steps)
    return *measured, take_figures(trainer)


def run_table(out: Path, common: dict[str, Any], results: dict[str, Any]) -> None:
    """Compute every case of the table, by TRL on one process, and by ours for each split."""
    folder = build_table_model(out / f"table-{os.environ.get('RANK', 0)}")
    settings: dict[str, Any] = {**build_settings(out), "beta": 0.1, "model_init_kwargs": {"dtype": "float32"}}
    trainer = PresetRows(model=folder, args=PackedGRPOConfig(**settings), **common)
    world, share = trainer.accelerator.num_processes, share_rollouts(trainer)
    stock = GRPOTrainer(model=folder, args=GRPOConfig(**settings), **common) if world == 1 else None
    reference = copy_state(trainer)
    move_weights(trainer.model, 5, 0.02)
    old = copy_state(trainer)
    move_weights(trainer.model, 6, 0.02)
    new = copy_state(trainer)
    for number, case in enumerate(CASES):
        if number % {1: 1, 2: 3, 4: 13}[world]:
            continue  # several processes are slow
        settings = build_case_settings(case)
        for parts, max_tokens in TABLE_SPLITS if number % 4 == 0 else TABLE_SPLITS[1:]:
            apply_settings(trainer, settings)
            trainer.args.max_tokens_per_device, trainer.preset = max_tokens, build_rows(share, parts)
            found = train_again(trainer, old if case.is_off_policy else new, new)
            results["table"][number][f"{parts} parts"] = found
        if stock is not None:
            stock.model.load_state_dict(new)
            before = old if case.is_off_policy else None
            found = train_trl(stock, settings, before, reference if settings["beta"] > 0 else None)
            results["trl_table"][number] = (*found[:2], take_figures(stock))


def copy_state(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def take_figures(trainer: Any) -> dict[str, float]:
    """Take the metrics that wait to be logged, as they would be."""
    metrics = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    trainer._metrics["train"].clear()
    return metrics


def run_layout(trainer: PresetRows, architecture: str, results: dict[str, Any]) -> None:
    """Compute what one layout of one architecture gives, over the loss types."""
    layout, share, world = trainer.layout_kind, share_rollouts(trainer), trainer.accelerator.num_processes
    trainer.use_vllm = True  # the loss is to read the importance ratio
    for loss_type in list_loss_types(architecture, layout, world):
        found = results["training"][architecture, layout, loss_type]
        for parts, max_tokens in SPLITS if loss_type in DIVIDED else (SPLITS[0], SPLITS[-1]):
            found[f"{parts} parts of {max_tokens}"] = train_ours(trainer, loss_type, share, parts, max_tokens)
        for count in (1, 4) if loss_type in DIVIDED else ():
            found[f"{count} micro-steps"] = train_ours(trainer, loss_type, share, 2, 200, per_generation=count)
        results["evaluation"][architecture, layout, loss_type] = evaluate_ours(trainer, loss_type, share)
    results["nothing"][architecture, layout] = train_nothing(trainer)
    if (architecture, layout) == ("llama", "tree"):
        results["generations"] = [train_generations(trainer, share, kept) for kept in ((0, 8), (0, 4), (4, 8))]
    if world == 1:
        results["logps"][architecture, layout] = score_ours(trainer)


def note_kept_prefixes(kept: list[int]) -> None:
    fill = prefix.SharedPrefix.fill

    def fill_and_note(self: Any, *args: Any) -> None:
        kept.append(len(self.token_ids))
        fill(self, *args)

    prefix.SharedPrefix.fill = fill_and_note  # type: ignore[method-assign]
    prefix.LEAST_TOKENS = 4


def main(out: Path) -> None:
    common = build_common()
    results: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    results["kept"] = []
    note_kept_prefixes(results["kept"])
    run_table(out, common, results)
    for architecture in ("llama", "qwen3", "qwen3_5"):
        for layout in LAYOUTS:
            world = int(os.environ.get("WORLD_SIZE", 1))
            if list_loss_types(architecture, layout, world):
                args = PackedGRPOConfig(**build_settings(out), sequence_layout=layout)
                trainer = PresetRows(model=build_model(architecture), args=args, **common)
                run_layout(trainer, architecture, results)
        if world == 1:
            stock = GRPOTrainer(model=build_model(architecture), args=GRPOConfig(**build_settings(out)), **common)
            for loss_type in list_loss_types(architecture, "tree", 1):
                settings = {"loss_type": loss_type, "vllm_importance_sampling_mode": "token_truncate"}
                results["trl"][architecture, loss_type] = train_trl(stock, settings)
    if world == 2:
        results["empty_last"] = train_empty_last(out, common)
    if trainer.accelerator.is_main_process:
        plain = {name: dict(found) if isinstance(found, dict) else found for name, found in results.items()}
        torch.save(plain, out / f"{world}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
