"""TRL's GRPO losses, token by token, and the figures that a step logs of them.

The formulas are those of TRL 1.16 (`GRPOTrainer._compute_loss`), which `tests/grpo/loss/test_token_loss.py` compares
with TRL itself for every setting that the config accepts. There, a row is a sequence and a pass is a batch. Here a
rollout is the sequence and an optimizer step the batch (law 5): terms of a whole rollout come from `rollout_terms`,
and the loss of a pass is the sum of its tokens' losses times their shares (`rows.token_shares`), so that passes add up
to the step.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from polar_trl.grpo.loss.importance import bound_ratio

MicroBatch = dict[str, Any]


def token_losses(
    logps_BC: Tensor, batch: MicroBatch, args: Any, *, corrects: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Compute the loss of each trained token of a pass of B rows, before its share; undefined outside the mask.

    Args:
        logps_BC: Under the policy that is trained, with a gradient.
        batch: From `build_micro_batch`; with `old_per_token_logps` where the policy has moved since they were
            sampled, `ref_per_token_logps` for a KL penalty, and the terms of `add_rollout_terms` if any are needed.
        args: The config.
        corrects: The ratio to the policy that sampled is corrected for.

    Returns:
        losses: [B, C].
        figures: By the name of a metric, values and weights [B, C] of the mean that it is.
    """
    mask_BC = batch["completion_mask"]
    advantages = batch["advantages"] if batch["advantages"].ndim == 2 else batch["advantages"][:, None]
    old_BC = batch.get("old_per_token_logps", logps_BC.detach())
    unit_BC = (logps_BC - logps_BC.detach()).exp()  # 1, with the gradient of a log-probability
    is_sequence = args.importance_sampling_level == "sequence"
    ratio_BC = batch["mean_log_ratio"].exp() * unit_BC if is_sequence else (logps_BC - old_BC).exp()
    # a figure of whole rollouts counts each rollout once, one of tokens each token
    weights_BC = mask_BC / batch["rollout_tokens"][:, None] if is_sequence else mask_BC.float()
    weight = batch["policy_weight"] if "policy_weight" in batch else policy_weight(old_BC, batch, args, corrects)
    figures: dict[str, tuple[Tensor, Tensor]] = {}
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        losses_BC = -ratio_BC.clamp(max=high).detach() * advantages * logps_BC * weight
        figures["cispo_clip_ratio"] = (ratio_BC > high) & (advantages > 0), weights_BC
    elif args.loss_type == "vespo":
        losses_BC = -batch["phi"] * advantages * logps_BC * weight
        figures["vespo/phi_seq_mean"] = batch["phi"].expand_as(mask_BC), mask_BC / batch["rollout_tokens"][:, None]
    else:
        if args.loss_type == "sapo":
            temperatures = torch.where(advantages > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
            losses_BC = -torch.sigmoid(temperatures * (ratio_BC - 1)) * 4 / temperatures * advantages
        else:
            losses_BC = -torch.min(
                ratio_BC.clamp(max=args.delta) * advantages if args.delta is not None else ratio_BC * advantages,
                ratio_BC.clamp(1 - args.epsilon, 1 + high) * advantages,
            )
            low_BC = (ratio_BC < 1 - args.epsilon) & (advantages < 0)
            high_BC = (ratio_BC > 1 + high) & (advantages > 0)
            figures["clip_ratio/low_mean"] = low_BC, weights_BC
            figures["clip_ratio/high_mean"] = high_BC, weights_BC
            figures["clip_ratio/region_mean"] = low_BC | high_BC, weights_BC
        losses_BC = losses_BC * (batch["mean_weight"] if is_sequence else weight)
    if args.beta != 0.0:
        kl_BC = _penalty(logps_BC, ratio_BC, batch, args)
        losses_BC = losses_BC + args.beta * kl_BC
        figures["kl"] = kl_BC, mask_BC.float()
    return losses_BC, figures


def _penalty(logps_BC: Tensor, ratio_BC: Tensor, batch: MicroBatch, args: Any) -> Tensor:
    """Estimate the divergence from the reference policy, importance-corrected if the config says so."""
    kl_BC = kl_estimate(batch["ref_per_token_logps"], logps_BC)
    if not args.use_bias_correction_kl:
        return kl_BC
    if args.importance_sampling_level == "token":
        return kl_BC * ratio_BC
    # each token's ratio is the rollout's, so its gradient weighs the rollout's mean: see `rollout_terms`
    coef_BC = ratio_BC.detach()
    return kl_BC * coef_BC + batch["mean_kl"] * (ratio_BC - coef_BC)


def kl_estimate(ref_logps_BC: Tensor, logps_BC: Tensor) -> Tensor:
    """Estimate the KL divergence from the reference policy, token by token (nats): Schulman's k3, exp(d) - d - 1."""
    log_ratio_BC = ref_logps_BC - logps_BC
    return log_ratio_BC.exp() - log_ratio_BC - 1


def policy_weight(old_logps_BC: Tensor, batch: MicroBatch, args: Any, corrects: bool) -> Tensor:
    """Compute the weight of each token's policy term: the bounded ratio to the policy that sampled, and masks.

    Returns:
        Something that broadcasts to [B, C]. VESPO has the ratio in its phi.
    """
    weight = torch.ones_like(batch["sampling_per_token_logps"])
    if corrects and args.loss_type != "vespo":
        log_ratio = batch.get("sequence_gap", old_logps_BC - batch["sampling_per_token_logps"])
        weight = bound_ratio(log_ratio, args)
    for name in ("off_policy_mask", "entropy_mask"):
        if name in batch:
            weight = weight * batch[name]
    return weight


class LossFigures:
    """Collect means over the tokens of a step, pass by pass: a pass counts as much as it has tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = defaultdict(list)
        self._row_means: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, values_BC: Tensor, weights_BC: Tensor) -> None:
        """Add the values of a pass to the weighted mean of that name."""
        values_BC = values_BC.detach() * weights_BC
        self._sums[name].append(torch.stack([values_BC.sum(), weights_BC.sum()]).double())
        if name in _EXTREMES:
            means_B = values_BC.sum(dim=1) / weights_BC.sum(dim=1)
            self._row_means[name].append(means_B[~means_B.isnan()].double())

    def add_part(self, name: str, part: Tensor) -> None:
        """Add the part of a pass to a figure that is a sum over passes and ranks."""
        self._sums[name].append(torch.stack([part.detach(), part.new_zeros(())]).double())

    def summarize(self, accelerator: Any) -> dict[str, float]:
        """Compute means over all ranks' tokens, and the extreme mean of a row where TRL logs one (a collective).

        Every rank has the same passes to add, so the same names.
        """
        if not self._sums:
            return {}
        sums = accelerator.reduce(
            torch.stack([torch.stack(s).sum(dim=0) for s in self._sums.values()]), reduction="sum"
        )
        figures = {
            name: total / (count or 1.0) for name, (total, count) in zip(self._sums, sums.tolist(), strict=True)
        }
        for name, means in self._row_means.items():
            extreme, sign = _EXTREMES[name]
            largest = (sign * torch.cat([*means, means[0].new_full((1,), -sign * torch.inf)])).amax()
            figures[extreme] = sign * accelerator.gather(largest[None]).amax().item()
        return figures


_EXTREMES = {"clip_ratio/low_mean": ("clip_ratio/low_min", -1), "clip_ratio/high_mean": ("clip_ratio/high_max", 1)}
"""Means of which the extreme over rows is logged: its name, and 1 for the largest or -1 for the least."""
