"""Compute the loss terms of a whole rollout or step, whatever passes and ranks their tokens lie in.

TRL computes them from the one pass that it is in: sequence-level importance weights (GSPO), VESPO's phi, the
sequence-level ratio to the sampling policy, DeepSeek-V3.2's off-policy mask, the mask of high-entropy tokens. Here a
rollout's rows may lie in several passes, which run one after the other. So each pass of the step is scored once more
before the first one trains, without gradients; sums by rollout are added up over passes and ranks, and every row is
given those of its rollout. That costs a forward pass over all tokens, and only for the settings that need it.

A value without a gradient is not enough for a ratio of sequence level. Take a rollout of three tokens in two rows,
with log-ratios (0.3, 0.0) and (-0.6): their mean is -0.1 and the rollout's ratio c = 0.905. As one row, its loss is
-A c, with a gradient of -A c / 3 to each token. Here each token has the loss -A c (l / detach(l)), with l the token's
probability, and a share of 1/3: the value sums up to -A c and the gradient of each token is -A c / 3, too.
This holds as long as the tokens of a rollout weigh the same. Where they do not (token-level bounds of the ratio to the
sampling policy, masked tokens), sum_t c w_t has the gradient c mean(w) for each token: each is given the mean weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from polar_trl.grpo.loss.importance import bound_ratio
from polar_trl.grpo.loss.token_loss import MicroBatch, kl_estimate, policy_weight

LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT = math.log(1e-8), 20.0
"""TRL's bounds of a logarithm within VESPO's weight."""


def needs_rollout_terms(args: Any, *, corrects: bool) -> bool:
    """Tell whether the loss of this config has terms that the pass of a row cannot know."""
    return (
        args.importance_sampling_level == "sequence"
        or args.loss_type == "vespo"
        or (corrects and args.vllm_importance_sampling_mode.startswith("sequence"))
        or args.off_policy_mask_threshold is not None
        or args.top_entropy_quantile < 1.0
    )


@torch.no_grad()
def add_rollout_terms(
    windows: Sequence[Sequence[MicroBatch]],
    score: Callable[[MicroBatch], tuple[Tensor, Tensor]],
    args: Any,
    *,
    corrects: bool,
    accelerator: Any,
) -> None:
    """Give every pass of a step the terms that `token_losses` reads (a collective).

    Args:
        windows: This rank's passes; rollouts are whole within a window, over all ranks.
        score: Log-probabilities and entropies [B, C] of a pass under the policy that is about to be trained.
    """
    passes, entropies = [], []
    for batch in (batch for window in windows for batch in window):
        logps_BC, entropies_BC = score(batch)
        passes.append((batch, logps_BC, batch.get("old_per_token_logps", logps_BC)))
        entropies.append(entropies_BC.float())
    if args.top_entropy_quantile < 1.0:
        _add_entropy_masks([batch for batch, _, _ in passes], entropies, args.top_entropy_quantile, accelerator)
    sums = _sum_by_rollout(windows, [_row_sums(*part, args, corrects=corrects) for part in passes])
    for (batch, _, _), sums_of_pass in zip(passes, sums, strict=True):
        _add_sequence_terms(batch, sums_of_pass, args, corrects=corrects)
    for batch, _, old_BC in passes:
        batch["policy_weight"] = policy_weight(old_BC, batch, args, corrects).expand_as(old_BC)
    if args.importance_sampling_level == "sequence":
        weighted = [_row_weights(batch, logps_BC, args) for batch, logps_BC, _ in passes]
        for (batch, _, _), (weight_B1, kl_B1) in zip(passes, _sum_by_rollout(windows, weighted), strict=True):
            batch["mean_weight"] = weight_B1 / batch["rollout_tokens"][:, None]
            batch["mean_kl"] = kl_B1 / batch["rollout_tokens"][:, None]


def _row_sums(batch: MicroBatch, logps_BC: Tensor, old_BC: Tensor, args: Any, *, corrects: bool) -> Tensor:
    """[B, 4] sums over each row's tokens: log-ratio of the present to the old policy, of the old to the sampling one,
    of the sampling to the present one, and VESPO's log-weight."""
    gap_BC = old_BC - batch["sampling_per_token_logps"]
    log_weight_BC = (logps_BC - old_BC).clamp(-MOST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    if corrects and args.loss_type == "vespo":
        log_weight_BC = log_weight_BC + bound_ratio(gap_BC, args).log().clamp(LEAST_LOG_WEIGHT, MOST_LOG_WEIGHT)
    terms = (logps_BC - old_BC, gap_BC, batch["sampling_per_token_logps"] - logps_BC, log_weight_BC)
    return torch.stack([(term_BC * batch["completion_mask"]).double().sum(dim=1) for term_BC in terms], dim=1)


def _add_sequence_terms(batch: MicroBatch, sums: Sequence[Tensor], args: Any, *, corrects: bool) -> None:
    """Add the terms that all tokens of a rollout share, from its sums [B, 1]."""
    drift_B1, gap_B1, staleness_B1, log_weight_B1 = sums
    tokens_B1, advantages_B1 = batch["rollout_tokens"][:, None], batch["advantages"][:, None]
    batch["mean_log_ratio"] = drift_B1 / tokens_B1
    if corrects and args.vllm_importance_sampling_mode.startswith("sequence"):
        batch["sequence_gap"] = gap_B1
    if args.off_policy_mask_threshold is not None:
        is_close_B1 = staleness_B1 / tokens_B1 <= args.off_policy_mask_threshold
        batch["off_policy_mask"] = (is_close_B1 | (advantages_B1 >= 0)).float()
    if args.loss_type == "vespo":
        batch["phi"] = GRPOTrainer.get_gamma_weights(
            advantages_B1,
            log_weight_B1,
            torch.ones_like(log_weight_B1),
            None,
            args.vespo_k_pos,
            args.vespo_lambda_pos,
            args.vespo_k_neg,
            args.vespo_lambda_neg,
        )


def _row_weights(batch: MicroBatch, logps_BC: Tensor, args: Any) -> Tensor:
    """[B, 2] sums over each row's tokens of the factors of the rollout's ratio: the policy's weight, the KL."""
    kl_BC = torch.zeros_like(logps_BC)
    if args.beta != 0.0:
        kl_BC = kl_estimate(batch["ref_per_token_logps"], logps_BC)
    terms = (batch["policy_weight"], kl_BC)
    return torch.stack([(term_BC * batch["completion_mask"]).double().sum(dim=1) for term_BC in terms], dim=1)


def _sum_by_rollout(windows: Sequence[Sequence[MicroBatch]], values: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sum each column of the passes' values [B, columns] over all rows of a rollout, to a [B, 1] (a collective)."""
    # a step may be fed by several windows that have the same rollouts, each of which counts for itself
    keys = [
        [(number, row["rollout"]) for row in batch["rows"]]
        for number, window in enumerate(windows)
        for batch in window
    ]
    local = [
        (key, row)
        for of_pass, part in zip(keys, values, strict=True)
        for key, row in zip(of_pass, part.tolist(), strict=False)  # a pass without rows has one that trains nothing
    ]
    totals: dict[Any, list[float]] = {}
    for key, row in gather_object(local):
        totals[key] = [a + b for a, b in zip(totals.get(key, [0.0] * len(row)), row, strict=True)]
    sums = []
    for of_pass, part in zip(keys, values, strict=True):
        rows = [totals[key] for key in of_pass] or torch.zeros(part.shape).tolist()
        sums.append([torch.tensor(column, device=part.device)[:, None] for column in zip(*rows, strict=True)])
    return sums


def _add_entropy_masks(
    batches: Sequence[MicroBatch], entropies: Sequence[Tensor], quantile: float, accelerator: Any
) -> None:
    """Mark the share `quantile` of the step's tokens that has the highest entropies (a collective)."""
    chosen = [values_BC[batch["completion_mask"].bool()] for batch, values_BC in zip(batches, entropies, strict=True)]
    local = torch.cat([torch.zeros(0, device=accelerator.device), *chosen])
    everywhere = accelerator.gather(accelerator.pad_across_processes(local, pad_index=-torch.inf))
    threshold = torch.quantile(everywhere[everywhere != -torch.inf], 1.0 - quantile)
    for batch, values_BC in zip(batches, entropies, strict=True):
        batch["entropy_mask"] = ((values_BC >= threshold) & batch["completion_mask"].bool()).float()
