"""Log-probabilities of trainer and engine on the same tokens -> importance ratios, and how far apart they are."""

from dataclasses import dataclass

import torch
from torch import Tensor


def importance_ratio(
    trainer_logps_BT: Tensor,
    sampling_logps_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Bounded ratio of training to sampling policy; [B, T] for token modes, [B, 1] for sequence modes.

    Modes are TRL's: "token_truncate" and "sequence_truncate" clamp the ratio, "token_mask" and "sequence_mask" set
    it to 0 outside the bounds. A sequence is one row.
    """
    log_ratio = (trainer_logps_BT - sampling_logps_BT) * mask_BT
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    low = float("-inf") if clip_min is None else clip_min
    high = float("inf") if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """How far trainer and engine disagree on the sampled tokens, in nats."""

    total: Tensor
    """Sum of absolute differences; a scalar."""
    count: Tensor
    """Tokens compared; a scalar."""
    largest: Tensor
    """0 where nothing was compared; a scalar."""


def logprob_gap(trainer_logps_BT: Tensor, sampling_logps_BT: Tensor, mask_BT: Tensor) -> Gap:
    """The gap over the tokens in the mask."""
    gap_BT = (trainer_logps_BT - sampling_logps_BT).abs() * mask_BT
    return Gap(total=gap_BT.sum(), count=mask_BT.sum().to(gap_BT.dtype), largest=gap_BT.max())
