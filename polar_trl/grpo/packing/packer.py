"""Pack the rows of a generation batch into forward passes, for each optimizer step and rank.

A window is the largest part that both a generation batch and an optimizer step divide into:
gcd(steps_per_generation, gradient_accumulation_steps) micro-steps. Its rollouts are whole, and every rank has as many
passes of it as every other.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from polar_trl.grpo.logs.trained_rows import describe_row
from polar_trl.grpo.loss.token_loss import MicroBatch
from polar_trl.grpo.packing.attention import BLOCK_SIZE
from polar_trl.grpo.packing.balance import CostModel, Plan, plan_micro_batches
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.packing.forward import pack_rows
from polar_trl.grpo.packing.layout import Ids, begins_with
from polar_trl.grpo.packing.prefix import SharedPrefix, choose_prefix, has_dropout
from polar_trl.grpo.rows import Row, rollout_tokens, token_shares

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
    """

    def __init__(self, args: Any, accelerator: Any, model: Any, layout_kind: Any) -> None:
        self.layout_kind = layout_kind
        self._args = args
        self._accelerator = accelerator
        self._cost = build_cost_model(model)
        self._can_keep_prefix = not _gathers_weights(accelerator) and not has_dropout(model)

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
        windows, plans, spared = [], [], 0
        for part in deal_rollouts(rows, num_windows, seed=self._args.seed + step):
            plan = self._plan_window([rows[i].token_ids_T for i in part])
            plans.append(plan)
            for rank, of_rank in enumerate(plan.micro_batches):
                passes = [[members[part[i]] for i in of_pass] for of_pass in of_rank]
                prefix = self._choose_prefix(passes) if mode == "train" else None
                if prefix is not None:
                    spared += (len(_find_readers(passes, prefix)) - 2) * len(prefix)
                if rank == self._accelerator.process_index:
                    windows.append(self._build_window(passes, prefix))
        return windows, {
            "polar/trained_tokens": sum(row.num_trainable for row in rows),
            "polar/forwarded_tokens": sum(plan.forwarded_tokens for plan in plans) - spared,
            "polar/unique_tokens": sum(plan.unique_tokens for plan in plans),
            "polar/forward_passes": sum(plan.num_micro_batches for plan in plans),
            "polar/rank_imbalance": max(_imbalance(plan.costs_W) for plan in plans),
        }

    def _plan_window(self, rows: list[Ids]) -> Plan:
        return plan_micro_batches(
            rows,
            num_ranks=self._accelerator.num_processes,
            max_tokens=1 if self.layout_kind == "single" else self._args.max_tokens_per_device,
            share_prefixes=self.layout_kind == "tree",
            cost=self._cost,
        )

    def _choose_prefix(self, passes: Sequence[Sequence[Member]]) -> Ids | None:
        """Return the prefix that a rank's passes keep from one to the next."""
        if self.layout_kind != "tree" or not self._can_keep_prefix:
            return None
        rows = [[(row.token_ids_T, int(row.trainable_T.argmax())) for row, _, _ in of_pass] for of_pass in passes]
        return choose_prefix(rows, multiple=BLOCK_SIZE if self._accelerator.device.type == "cuda" else 1)

    def _build_window(self, passes: Sequence[Sequence[Member]], prefix_ids: Ids | None) -> Window:
        window = [self._build_pass(members) for members in passes]
        if prefix_ids is not None:
            prefix, readers = SharedPrefix(prefix_ids), _find_readers(passes, prefix_ids)
            for number in readers:
                rows = [row for row, _, _ in passes[number]]
                window[number]["prefix"] = prefix
                window[number]["packed_after_prefix"] = pack_rows(
                    [row.token_ids_T for row in rows],
                    [row.trainable_T for row in rows],
                    kind=self.layout_kind,
                    device=self._accelerator.device,
                    after=(prefix, "close" if number == readers[-1] else "read"),
                )
        return window

    def _build_pass(self, members: Sequence[Member]) -> MicroBatch:
        """A pass over rows, with the share of each row's tokens and the tokens of its rollout."""
        rows, shares, tokens = zip(*members, strict=True) if members else ((), (), ())
        micro_batch = build_micro_batch(rows, shares, tokens, kind=self.layout_kind, device=self._accelerator.device)
        return micro_batch | {"rows": [describe_row(row) for row in rows]}


def _find_readers(passes: Sequence[Sequence[Member]], prefix: Ids) -> list[int]:
    """List the passes that have a row which begins with the prefix."""
    return [
        number
        for number, members in enumerate(passes)
        if any(begins_with(row.token_ids_T, prefix) for row, _, _ in members)
    ]


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
    """Return the cost model of a policy, from its own weights and configuration."""
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
