"""Pack the rows of a generation batch into forward passes, for each optimizer step and rank.

A window is the largest part that both a generation batch and an optimizer step divide into:
gcd(steps_per_generation, gradient_accumulation_steps) micro-steps. Its rollouts are whole, and every rank has as many
passes of it as every other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from polar_trl.grpo.logs.trained_rows import describe_row
from polar_trl.grpo.loss.token_loss import MicroBatch
from polar_trl.grpo.packing.attention import BLOCK_SIZE
from polar_trl.grpo.packing.balance import CostModel, Plan, plan_micro_batches
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.packing.forward import LayoutKind
from polar_trl.grpo.packing.layout import Ids, begins_with
from polar_trl.grpo.packing.prefix import SharedPrefix, choose_prefix, has_dropout
from polar_trl.grpo.rows import Row, rollout_tokens, token_shares

LEAST_TREE_SAVING = 1.03
"""How many times cheaper a tree has to be than packed rows by predicted cost, which knows nothing of half-filled
blocks of its attention or of its delta nets' calls by generation. An H100 ran trees of 1.09 to 1.19 times fewer tokens
1.03 to 1.07 times faster (docs/performance.md)."""
FILL_COST = 0.25
"""Of a pass over a prefix without gradients, in parts of one with: a forward of four, as in `choose_prefix`."""
Window = list[MicroBatch]
Member = tuple[Row, float, int]
"""A row, the share of its tokens in the loss, and the tokens of its rollout."""


class Packer:
    """Plans passes by predicted cost.

    Args:
        args: The config.
        accelerator: Of the trainer.
        model: The policy, unwrapped.
        layout_kind: "tree", "packed" or "single", from `choose_layout`.
        count_spare: Tokens of a prefix that layers can keep, the same on all ranks; None where that is not known.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Any,
        model: Any,
        layout_kind: LayoutKind,
        *,
        count_spare: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.layout_kind = layout_kind
        self._args = args
        self._accelerator = accelerator
        self._cost = build_cost_model(model)
        self._can_keep = layout_kind == "tree" and not _gathers_weights(accelerator) and not has_dropout(model)
        self._count_spare = count_spare

    @property
    def micro_steps_per_window(self) -> int:
        """Micro-steps of a window: what a generation batch and an optimizer step can both be divided into."""
        return math.gcd(self._args.steps_per_generation, self._args.gradient_accumulation_steps)

    def plan(self, local_rows: list[Row], mode: str, *, step: int) -> tuple[list[Window], dict[str, float]]:
        """Return this rank's passes of each window, and the figures that are logged of them (a collective).

        Each window has its own rollouts and the loss that `token_shares` declares; a generation's loss is the mean
        over its windows. An evaluation batch is one window.

        Args:
            local_rows: Of this rank.
            step: Optimizer steps so far, which decides how rollouts are dealt.
        """
        rows: list[Row] = gather_object(local_rows)
        num_windows = self._args.steps_per_generation // self.micro_steps_per_window if mode == "train" else 1
        shares = token_shares(
            rows, loss_type=self._args.loss_type, max_completion_length=self._args.max_completion_length
        )
        members = list(zip(rows, [share * num_windows for share in shares], rollout_tokens(rows), strict=True))
        windows, plans = [], []
        most_kept = self._count_spare() if mode == "train" and self._can_keep else 0
        for part in deal_rollouts(rows, num_windows, seed=self._args.seed + step):
            planned = self._plan_window([rows[i] for i in part], most_kept)
            plans.append(planned)
            windows.append(self._build_window(planned, [members[i] for i in part]))
        return windows, {
            "polar/trained_tokens": sum(row.num_trainable for row in rows),
            "polar/forwarded_tokens": sum(planned.forwarded_tokens for planned in plans),
            "polar/unique_tokens": sum(planned.plan.unique_tokens for planned in plans),
            "polar/forward_passes": sum(planned.plan.num_micro_batches for planned in plans),
            "polar/rank_imbalance": max(_imbalance(planned.plan.costs_W) for planned in plans),
            "polar/tree": sum(planned.kind == "tree" for planned in plans) / len(plans),
        }

    def _plan_window(self, rows: list[Row], most_kept: int | None) -> "_PlannedWindow":
        """Plan in the run's layout, or packed where that was not asked for and a tree saves too little."""
        planned = self._plan_layout(self.layout_kind, rows, most_kept)
        if planned.kind == "tree" and self._args.sequence_layout is None:
            packed = sum(self._cost.cost_of(len(row.token_ids_T)) for row in rows)
            if packed < LEAST_TREE_SAVING * planned.predict_cost(self._cost):
                return self._plan_layout("packed", rows, most_kept)
        return planned

    def _plan_layout(self, kind: LayoutKind, rows: list[Row], most_kept: int | None) -> "_PlannedWindow":
        ids, firsts = [row.token_ids_T for row in rows], [int(row.trainable_T.argmax()) for row in rows]
        plan = plan_micro_batches(
            ids,
            num_ranks=self._accelerator.num_processes,
            max_tokens=1 if kind == "single" else self._args.max_tokens_per_device,
            share_prefixes=kind == "tree",
            cost=self._cost,
        )
        kept = {}
        for rank, passes in enumerate(plan.micro_batches if kind == "tree" else ()):
            found = choose_prefix(
                [[(ids[i], firsts[i]) for i in of_pass] for of_pass in passes],
                multiple=BLOCK_SIZE if self._accelerator.device.type == "cuda" else 1,
                most_tokens=most_kept,
            )
            if found is not None:
                users = [n for n, of_pass in enumerate(passes) if any(begins_with(ids[i], found) for i in of_pass)]
                kept[rank] = found, users
        return _PlannedWindow(kind=kind, plan=plan, kept=kept)

    def _build_window(self, planned: "_PlannedWindow", members: list[Member]) -> Window:
        """Build this rank's passes."""
        rank = self._accelerator.process_index
        ids, users = planned.kept.get(rank, (None, []))
        prefix = None if ids is None else SharedPrefix(ids)
        return [
            self._build_pass(
                [members[i] for i in of_pass],
                kind=planned.kind,
                prefix=prefix if number in users else None,
                is_read=number != users[-1] if users else True,
            )
            for number, of_pass in enumerate(planned.plan.micro_batches[rank])
        ]

    def _build_pass(self, members: Sequence[Member], **layout: Any) -> MicroBatch:
        """A pass over rows, with the share of each row's tokens and the tokens of its rollout."""
        rows, shares, tokens = zip(*members, strict=True) if members else ((), (), ())
        micro_batch = build_micro_batch(rows, shares, tokens, device=self._accelerator.device, **layout)
        return micro_batch | {"rows": [describe_row(row) for row in rows]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlannedWindow:
    """The passes of a window on all ranks, in a layout."""

    kind: LayoutKind
    plan: Plan
    kept: dict[int, tuple[Ids, list[int]]]
    """By rank, the prefix that its layers keep, and the numbers of the passes that have rows with it."""

    @property
    def forwarded_tokens(self) -> int:
        # of the passes with a prefix only the last one forwards it, and the one more that fills
        return self.plan.forwarded_tokens - sum((len(users) - 2) * len(ids) for ids, users in self.kept.values())

    def predict_cost(self, cost: CostModel) -> float:
        """Of all ranks together, in the unit of `cost`."""
        spared = sum((len(users) - 1 - FILL_COST) * cost.cost_of(len(ids)) for ids, users in self.kept.values())
        return sum(self.plan.costs_W) - float(spared)


def deal_rollouts(rows: Sequence[Row], num_windows: int, *, seed: int) -> list[list[int]]:
    """Return the indices of rows for each window; rollouts stay whole, and all ranks deal alike."""
    rollouts = list(dict.fromkeys(row.rollout_id for row in rows))
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(seed)).tolist()
    window_of = {rollouts[index]: place % num_windows for place, index in enumerate(order)}
    return [
        [index for index, row in enumerate(rows) if window_of[row.rollout_id] == window]
        for window in range(num_windows)
    ]


def build_cost_model(model: Any) -> CostModel:
    """Build the cost model of a policy from its own weights and configuration."""
    embeddings = {id(module.weight) for module in (model.get_input_embeddings(),) if module is not None}
    num_parameters = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    return CostModel.of(model.config, num_parameters)


def _gathers_weights(accelerator: Any) -> bool:
    """Tell whether ranks gather weights at each forward (FSDP, ZeRO-3), of which they all make equally many then."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return accelerator.distributed_type == DistributedType.FSDP or (plugin is not None and plugin.zero_stage == 3)


def _imbalance(costs_W: Sequence[float]) -> float:
    """Return how much longer the slowest rank takes than the mean, as a share."""
    mean = sum(costs_W) / len(costs_W)
    return max(costs_W) / mean - 1.0 if mean else 0.0
