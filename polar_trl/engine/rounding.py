"""Round float32 weights to half precision with a fixed random offset per weight (dithered rounding).

Published weights lie on the grid of bfloat16, and an optimizer step of 1e-6 is a hundredth of the grid's spacing:
rounded to nearest, a weight stays where it was for dozens of steps, in the engine and in an autocast pass alike. With
an offset, uniform over one spacing and drawn once per weight, a weight that has moved by a hundredth of a spacing is
on the next grid point with a probability of one hundredth, so that the rounded weights move, in expectation, as the
weights do. A weight that has not moved keeps its value, and a fixed offset adds no noise from step to step.

Spacings are counted in units of the last place of float32. A bfloat16 is the upper 16 bits of a float32, so its
spacing is 2**16 such units. A float16 has 13 bits less than a float32 from 2**-14 on; below, where its spacing no
longer shrinks (2**-24), numbers are left as they are, and moves of 1e-6 are seen anyway.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from polar_trl.errors import ConfigError

HALF_DTYPES = (torch.bfloat16, torch.float16)
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32's fraction that the dtype does not have."""
_FLOAT16_NORMAL = 0x38800000
"""The bits of 2**-14 as float32."""
_MAGNITUDE = 0x7FFFFFFF
CHUNK = 1 << 26
"""Elements that are treated at a time, which bounds the memory of intermediate results (256 MiB each)."""


def find_pass_dtype(accelerator: Any, model: Any) -> torch.dtype:
    """Find the dtype that the trainer's forward pass multiplies in: autocast's, or the weights' own."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    return autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())


def choose_compute_dtype(pass_dtype: torch.dtype, engine_dtype: torch.dtype) -> torch.dtype:
    """Choose the coarser of the dtypes that the trainer's pass and the engine compute in: its grid fits both.

    Raises:
        ConfigError: they are two different half precisions, of which neither holds the other's numbers.
    """
    halves = {dtype for dtype in (pass_dtype, engine_dtype) if dtype in HALF_DTYPES}
    if len(halves) > 1:
        raise ConfigError(
            f"the trainer computes in {_name(pass_dtype)} and the engine in {_name(engine_dtype)}: neither holds the "
            "other's numbers; leave engine_dtype out, or set it to the trainer's, or to float32"
        )
    return halves.pop() if halves else torch.float32


def draw_offsets(seed: int, name: str, start: int, count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw offsets [count] of a parameter's elements from `start` on: int32, uniform over one spacing around 0.

    Half a spacing itself is left out, so that it does not matter to which side others round what lies between.

    They follow from the arguments alone, on every device and however the parameter is sharded: a 32-bit hash of the
    element's index in the whole parameter (the finaliser "lowbias32" of C. Wellons, "Prospecting for Hash Functions",
    2018), keyed by seed and name.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "little", signed=True)
    x = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    x = _mix(_mix(x) ^ key)
    bits = DROPPED_BITS[dtype]
    half = 1 << (bits - 1)
    return (_shift_right(x, 32 - bits) - half).clamp_(min=1 - half)


def round_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 numbers, as int32 bits, to the nearest that `dtype` holds, halves away from zero."""
    dropped = DROPPED_BITS[dtype]
    rounded = (bits + (1 << (dropped - 1))) & -(1 << dropped)
    if dtype == torch.float16:
        rounded = torch.where((bits & _MAGNITUDE) < _FLOAT16_NORMAL, bits, rounded)
    return rounded


def add_offsets(bits: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Move float32 numbers, as int32 bits, by their offsets; zero and what is next to it stays."""
    smallest = _FLOAT16_NORMAL if dtype == torch.float16 else 1 << DROPPED_BITS[dtype]
    return bits + torch.where((bits & _MAGNITUDE) < smallest, 0, offsets)


def round_weight(weight: Tensor, name: str, dtype: torch.dtype, *, seed: int, dithered: bool) -> Tensor:
    """Round a whole float32 weight to `dtype`, into a new tensor of its shape.

    Args:
        weight: float32, contiguous; it is not changed.
        name: Of the parameter; with `seed` and an element's index it gives that element's offset.
        dithered: With offsets; else to nearest.
    """
    if dtype not in HALF_DTYPES or not dithered:
        return weight.to(dtype)
    rounded = torch.empty_like(weight, dtype=dtype)
    start = 0
    for chunk, out in zip(weight.view(-1).split(CHUNK), rounded.view(-1).split(CHUNK), strict=True):
        bits = chunk.view(torch.int32)
        offsets = draw_offsets(seed, name, start, len(bits), dtype=dtype, device=bits.device)
        out.copy_(round_bits(add_offsets(bits, offsets, dtype), dtype).view(torch.float32))
        start += len(bits)
    return rounded


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers by a bijection in which each bit of the result depends on all of the argument's."""
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right(x, 15)) * (0x846CA68B - (1 << 32))
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift unsigned 32-bit integers: torch's own shift copies the sign."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
