"""Keep float32 master weights for the optimizer, split into rounded weights for all that computes and a remainder.

Between two optimizer steps a trained parameter holds its master rounded to the grid of the half precision that the
trainer's pass and the engine share (dithered rounding, `engine.rounding`), so that both have the same numbers, also in
layers that autocast leaves in float32. The remainder of rounding, at most 16 bits of each weight, is kept beside it
and put back for the time of the optimizer's step. A weight on a grid of spacing 8, with an offset of 3 of -3 to 3:

    published 16             the master becomes 19 = 16 (computes) + 3 (kept)
    a step of 2              the master is 21 = 24 (computes) - 3 (kept): two of eight offsets flip a weight here
    a step of -4             the master is 17 = 16 (computes) + 1 (kept)

The offset is added once, when training begins, and then lives in the remainder: a checkpoint's model is the policy
that computed, and the remainders beside it (2 bytes a weight) make it the masters again.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from polar_trl.engine.rounding import CHUNK, add_offsets, draw_offsets, round_bits
from polar_trl.errors import ConfigError

_LOWER = 0 if sys.byteorder == "little" else 1
"""Index of the lower of the two halves of an int32."""
_LARGEST = 0x7FFF7FFF
"""Bits of a NaN that stays one when it is rounded up; all finite numbers are below."""


class RoundedWeights:
    """Hold the trained parameters of a model rounded, and the remainders of their masters.

    Args:
        named_parameters: Float32 parameters, by the names that their offsets follow from. Of a sharded one (DTensor)
            this rank's part is treated, with the offsets that it has in the whole.
        dtype: bfloat16 or float16.
        seed: Of the offsets.
        dithered: False rounds to nearest: all offsets are 0.

    Raises:
        ConfigError: a parameter is not float32, so that it could not hold a master.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, dtype: torch.dtype, seed: int, dithered: bool
    ) -> None:
        self.dtype = dtype
        self._parameters = dict(named_parameters)
        self._low: dict[str, Tensor] = {}
        """By name, int16 [local elements]: bits of the master less those of the rounded weight."""
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"the trained weight {name} is {str(parameter.dtype).removeprefix('torch.')}, in which the "
                    "optimizer's small steps round to nothing: leave dtype out of model_init_kwargs (float32 weights, "
                    "bf16: true for the pass), or train an adapter (use_peft: true) and no whole modules beside it"
                )
            weights = local_part(parameter)
            self._low[name] = torch.zeros(weights.numel(), dtype=torch.int16, device=weights.device)
            if dithered:
                self._add_offsets(name, seed)
        self.round()

    @torch.no_grad()
    def _add_offsets(self, name: str, seed: int) -> None:
        bits = _bits(self._parameters[name])
        start = _first_index(self._parameters[name])
        for chunk in bits.split(CHUNK):
            offsets = draw_offsets(seed, name, start, len(chunk), dtype=self.dtype, device=chunk.device)
            chunk.copy_(add_offsets(chunk, offsets, self.dtype))
            start += len(chunk)

    @torch.no_grad()
    def restore_masters(self, *_: Any) -> None:
        """Have parameters hold their masters, before the optimizer's step."""
        for name, parameter in self._parameters.items():
            _bits(parameter).add_(self._low[name])

    @torch.no_grad()
    def round(self, *_: Any) -> None:
        """Round parameters to what computes, after the optimizer's step, and keep the remainders."""
        for name, parameter in self._parameters.items():
            # a GPU's NaN has all bits: rounded up it would carry over into the sign, and be a zero
            bits = _bits(parameter).clamp_(max=_LARGEST)
            if self.dtype == torch.bfloat16:
                # its own lower half, read as a signed number, is what a weight has above its nearest bfloat16
                bits.sub_(self._low[name].copy_(bits.view(torch.int16)[_LOWER::2]))
                continue
            for chunk, low in zip(bits.split(CHUNK), self._low[name].split(CHUNK), strict=True):
                rounded = round_bits(chunk, self.dtype)
                low.copy_(chunk - rounded)
                chunk.copy_(rounded)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the masters back for each step of the optimizer."""
        self._hooks = (
            optimizer.register_step_pre_hook(self.restore_masters),
            optimizer.register_step_post_hook(self.round),
        )

    def leave(self) -> None:
        """Stop following the optimizer."""
        for hook in self._hooks:
            hook.remove()

    @property
    def is_sharded(self) -> bool:
        """Tell whether each rank holds a part of the weights."""
        return any(isinstance(parameter, DTensor) for parameter in self._parameters.values())

    def read_master(self, name: str, index: Tensor) -> Tensor:
        """Read the float32 masters at positions `index` (any shape) of this rank's part of a parameter."""
        bits = _bits(self._parameters[name])[index] + self._low[name][index]
        return bits.view(torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs beside the parameters: int16 [local elements] by name."""
        return dict(self._low)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a checkpoint's remainders. Raises `ConfigError` if they are those of other parameters."""
        if {name: low.shape for name, low in state.items()} != {name: low.shape for name, low in self._low.items()}:
            raise ConfigError("the checkpoint's master weights are those of other parameters than the model's")
        for name, low in state.items():
            self._low[name].copy_(low)


def local_part(parameter: nn.Parameter) -> Tensor:
    """Return the part of a parameter that this rank holds."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _bits(parameter: nn.Parameter) -> Tensor:
    """View the elements on this rank as flat int32, sharing memory."""
    return local_part(parameter).detach().view(-1).view(torch.int32)


def _first_index(parameter: nn.Parameter) -> int:
    """Find the position of this rank's first element in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if any(offsets[1:]):
        raise ConfigError(
            "a parameter is sharded along another dimension than its first: weight_rounding knows no such"
        )
    return int(offsets[0]) * (parameter.numel() // parameter.shape[0]) if parameter.dim() else 0
