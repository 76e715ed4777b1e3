"""Keep trainer and engine at one policy: both compute with the same rounded weights, which move as the masters do.

Which weights that concerns depends on what is trained. All weights of a model, or the whole modules beside an adapter:
they are rounded between optimizer steps (`RoundedWeights`). An adapter stays as it is, and the engine's merged copies
are rounded when they are made. DeepSpeed keeps masters of its own and rounds them to nearest after each step: there
the offsets are added to the masters once, which comes to the same.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from polar_trl.engine.rounding import HALF_DTYPES, add_offsets, draw_offsets
from polar_trl.errors import ConfigError
from polar_trl.grpo.weights.rounded_weights import RoundedWeights, local_part
from polar_trl.grpo.weights.update_ratio import UpdateRatio


class PolicyWeights(TrainerCallback):
    """Round the trained weights from the beginning of training on, and measure how pushes move them.

    Args:
        dtype: The one that the pass and the engine compute in; float32 is left alone.
        seed: Of the offsets.
        dithered: False rounds to nearest.
        is_deepspeed: DeepSpeed has the masters.
    """

    def __init__(self, dtype: torch.dtype, *, seed: int, dithered: bool, is_deepspeed: bool) -> None:
        self.dtype = dtype
        self.seed = seed
        self.dithered = dithered
        self._is_deepspeed = is_deepspeed
        self._saved: dict[str, Tensor] | None = None
        self._is_begun = self._is_resumed = False
        self._trained: dict[str, nn.Parameter] = {}
        self._num_adapted = 0
        self.rounded: RoundedWeights | None = None
        self.update_ratio = UpdateRatio()

    def resume(self, saved: dict[str, Tensor] | None) -> None:
        """Have training begin from a checkpoint, with these remainders of the masters, if it has any."""
        self._saved, self._is_resumed = saved, True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Round what is trained. Raises `ConfigError` where it cannot be, before the first rollout."""
        model = kwargs["model"]
        self._trained = dict(find_trained_weights(model))
        self._num_adapted = sum(p.numel() for name, p in model.named_parameters() if ".base_layer." in name)
        is_again, self._is_begun = self._is_begun, True
        is_resumed, self._is_resumed = self._is_resumed, False
        if self._saved is not None and self.dtype not in HALF_DTYPES:
            raise ConfigError(
                "the checkpoint's weights are rounded for half precision, and this run computes in float32: go on "
                "with bf16 (or fp16) as before, or begin a new run with the checkpoint as model"
            )
        if self.dtype not in HALF_DTYPES or not self._trained:
            return
        if self._is_deepspeed:
            if self.dithered and not is_again and not is_resumed:
                _dither_deepspeed(self._trained, self.dtype, self.seed)
            return
        if is_again and not is_resumed:
            return  # `train` was called before, and the masters are as it left them
        if self.rounded is not None:
            self.rounded.leave()
        optimizer = kwargs["optimizer"]
        self.rounded = RoundedWeights(self._trained.items(), dtype=self.dtype, seed=self.seed, dithered=self.dithered)
        if self._saved is not None:
            self.rounded.load_state_dict(self._saved)
        self.rounded.follow(getattr(optimizer, "optimizer", optimizer))

    def note_merged(self, name: str, merged: Tensor, pushed: Tensor) -> None:
        """Take a weight that an adapter was merged into: float32, and as the engine gets it."""
        if self._num_adapted:
            index = self.update_ratio.choose(name, merged.numel(), self._num_adapted, merged.device)
            self.update_ratio.note(name, merged.view(-1)[index], pushed.view(-1)[index])

    def measure_push(self, engine_dtype: torch.dtype, accelerator: Any) -> dict[str, float]:
        """Return metrics of a push that is over: update ratio and share of weights that changed (a collective)."""
        if self._is_deepspeed and not self._num_adapted:
            return {}  # the masters are not at hand
        total = sum(parameter.numel() for parameter in self._trained.values())
        for name, parameter in self._trained.items():
            weights = local_part(parameter)
            index = self.update_ratio.choose(name, weights.numel(), total, weights.device)
            computing = weights.detach().view(-1)[index]
            master = computing if self.rounded is None else self.rounded.read_master(name, index)
            self.update_ratio.note(name, master, computing.to(engine_dtype))
        return self.update_ratio.finish(accelerator)


def find_trained_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trained parameters, but those of adapters, under the names that they have without wrappers."""
    adapter = getattr(model, "prefix", None)  # of a PEFT model's parameters
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and not (adapter and adapter in name):
            for part in ("module.", "_checkpoint_wrapped_module."):
                name = name.replace(part, "")
            yield name, parameter


def _dither_deepspeed(parameters: dict[str, nn.Parameter], dtype: torch.dtype, seed: int) -> None:
    """Add the offsets to DeepSpeed's own float32 masters (a collective)."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    for name, parameter in parameters.items():
        master = safe_get_full_fp32_param(parameter)
        offsets = draw_offsets(seed, name, 0, master.numel(), dtype=dtype, device=master.device)
        bits = add_offsets(master.contiguous().view(-1).view(torch.int32), offsets, dtype)
        safe_set_full_fp32_param(parameter, bits.view(torch.float32).view(master.shape))
