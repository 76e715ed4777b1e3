"""Make an optimizer step only of a finite loss and gradient, and only where some rank has rows.

A step that is not made leaves weights, moments, step counts and the learning rate bit for bit as they are, on all
ranks. Several faults in a row end the run, before the next checkpoint. Under float16, a gradient that overflowed only
by the loss scale is no fault as long as `GradScaler` can lower the scale; a loss that is not finite always is, since
the forward pass knows no scale. The norm of a gradient is not finite already where its square does not fit float32, so
that AdamW's second moments cannot overflow either.

DeepSpeed steps inside the last backward pass and judges gradients itself (ZeRO 2 and 3 skip what is not finite), so
there the verdict is read afterwards, and a step that it made in spite of a fault ends the run at once.
"""

import logging
import math
from collections.abc import Iterable
from functools import partial, update_wrapper
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from polar_trl.errors import StepError

logger = logging.getLogger(__name__)

MAX_FAULTS = 3
"""Faults in a row that end the run: so many are no accident of one batch."""
LEAST_SCALE = 1.0
"""Lowest scale of the loss under float16: below it, gradients overflow that are out of range themselves."""
NUM_NAMED = 8
"""Most rollouts that the error at a run's end names; the log names all."""


class StepGuard:
    """Judge each step of an `AcceleratedOptimizer` before it is made. Methods are called on all ranks alike.

    Args:
        accelerator: Of the trainer.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._optimizer: Any = None
        self._make_step: Any = None
        self.has_rows = False
        """True where any rank has a row in the coming step, as far as is known."""
        self.fault: str | None = None
        """Reason why the step that was decided on last is not made; None: it is."""
        self._loss = 0.0
        self._rollout_ids: set[str] = set()
        self._num_faults = 0
        self._step = 0

    def note(self, loss: Tensor, rollout_ids: Iterable[str]) -> None:
        """Note the loss of this rank's passes, and the rollouts that they were of."""
        self._loss += loss.item()
        self._rollout_ids.update(rollout_ids)

    def attach(self, optimizer: Any) -> None:
        """Have the optimizer ask here first, from now on."""
        if optimizer is not self._optimizer:
            self._optimizer, self._make_step = optimizer, optimizer.step
            # with its attributes: torch's schedules warn of a step in which they do not know their own mark
            optimizer.step = update_wrapper(partial(self._step_if_sound), optimizer.step)

    def decide(self, grad_norm: float | None, step: int) -> None:
        """Decide on the coming step, and tell of a fault (a collective, where there are rows).

        Args:
            grad_norm: Of all ranks, before clipping; None where DeepSpeed computes none.
            step: Its number.

        Raises:
            StepError: too many faults in a row.
        """
        self._step, self.fault = step, None
        if not self.has_rows:
            return
        loss_is_bad, norm_is_bad, is_skipped = self._any_rank(
            not math.isfinite(self._loss),
            grad_norm is not None and not math.isfinite(grad_norm),
            self._is_deepspeed and not self._accelerator.deepspeed_engine_wrapped.engine.was_step_applied(),
        )
        if loss_is_bad:
            self.fault = "its loss is not finite"
        elif norm_is_bad or is_skipped:
            self.fault = "its gradient is not finite"
        if self.fault is None:
            self._num_faults = 0
            return
        rollout_ids = sorted(set(gather_object(sorted(self._rollout_ids))))
        if self._accelerator.is_main_process:
            logger.warning("optimizer step %d is not made: %s; rollouts: %s", step, self.fault, ", ".join(rollout_ids))
        if self._is_deepspeed and not is_skipped:
            raise StepError(
                f"DeepSpeed made optimizer step {step} although {self.fault}, so the weights may be spoiled: go on "
                "from the last checkpoint"
            )
        if loss_is_bad or not self._can_lower_scale():
            self._num_faults += 1
        if self._num_faults == MAX_FAULTS:
            named = ", ".join(rollout_ids[:NUM_NAMED]) + (" and others" if len(rollout_ids) > NUM_NAMED else "")
            raise StepError(
                f"optimizer step {step} cannot be made, nor could the {MAX_FAULTS - 1} before it: {self.fault} (the "
                f"weights are as the last step left them); look at its rollouts ({named}), and if they are as they "
                "should be, set learning_rate lower, or bf16: true in the place of fp16"
            )

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self._accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _can_lower_scale(self) -> bool:
        scaler = self._accelerator.scaler
        return scaler is not None and scaler.get_scale() > LEAST_SCALE

    def _any_rank(self, *flags: bool) -> list[bool]:
        found = torch.tensor(flags, dtype=torch.float32, device=self._accelerator.device)
        return [count > 0 for count in self._accelerator.reduce(found, reduction="sum").tolist()]

    def _step_if_sound(self, *args: Any, **kwargs: Any) -> None:
        """Stand in the place of the optimizer's `step`."""
        optimizer = self._optimizer
        is_made = self.has_rows and self.fault is None
        if is_made or self._is_deepspeed:
            self._make_step(*args, **kwargs)
        elif self.has_rows and optimizer.scaler is not None:
            # the scaler still has to hear of it: it lowers the scale, and forgets that gradients were unscaled
            patched, optimizer._optimizer_patched_step_method = optimizer._optimizer_patched_step_method, _make_none
            try:
                self._make_step(*args, **kwargs)
            finally:
                optimizer._optimizer_patched_step_method = patched
        # what accelerate's schedule and transformers' loop ask before they advance the learning rate
        optimizer._is_overflow = not is_made
        if is_made:
            self._require_finite_weights()
        self.has_rows, self._loss = False, 0.0
        self._rollout_ids.clear()

    def _require_finite_weights(self) -> None:
        """Read the optimizer's weights once. Raises `StepError` if any is not finite."""
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        shards = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        largest = torch.nn.utils.get_total_norm([shard for shard in shards if shard.numel()], math.inf)
        (is_broken,) = self._any_rank(not math.isfinite(largest.item()))
        if is_broken:
            raise StepError(
                f"optimizer step {self._step} made weights that are not finite, of a loss and a gradient that were: "
                "look at learning_rate and the optimizer's other settings, and go on from the last checkpoint"
            )


def _make_none(*args: Any, **kwargs: Any) -> None:
    """Make no step, in the place of a torch optimizer's."""
