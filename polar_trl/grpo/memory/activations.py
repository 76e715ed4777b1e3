"""Count the activation memory of one forward and backward pass of N tokens, from a model's configuration.

Nothing is computed: transformers' own code runs on fake tensors (shapes and dtypes, no data), and the bytes that are
alive at each moment are counted. So the figures follow the installed code, gradient checkpointing and autocast
included. Attention counts as a fused kernel (FlexAttention, flash), which keeps no N x N matrix. The LM head is not
counted: TRL computes it in tiles, see `memory.count_head`.
"""

import copy
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polar_trl.grpo.memory.kernel_shapes import IN_TORCH, Kernels, computed_with
from polar_trl.grpo.packing.adapters import fuse_adapters
from polar_trl.grpo.packing.layout import Layout, build_layout
from polar_trl.grpo.packing.linear_attention import (
    computed_in_torch,
    is_gated_delta_net,
    plan_layout,
    wrap_linear_attention,
)

_TRACED_TOKENS = (1024, 2048)
"""Of a model with gated delta nets in torch, which are a loop over the tokens: more take minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes beside the weights and their accumulated gradients, per device."""

    saved: int
    """Kept for the backward pass, at the end of the forward pass."""
    copies: int
    """Half-precision copies of weights that autocast keeps until the forward pass, with the LM head, is over."""
    forward_peak: int
    backward_peak: int
    """With the gradient of one weight at a time, before it is added to the others."""


def count_activations(
    build: Callable[[Any], Any],
    config: Any,
    *,
    num_tokens: int,
    autocast: bool,
    checkpointing: bool,
    kernels: Kernels = IN_TORCH,
) -> Activations:
    """Count the bytes that a forward and backward pass over one sequence of `num_tokens` holds at its worst moments.

    Args:
        build: From a configuration to a model on the meta device, whose weights have the dtype of the pass.
        autocast: Matrix products in bfloat16 whatever the weights are.

    Layers that are alike add the same each, to the byte, so that a few of many are enough.
    """

    model = build(config)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    few = _choose_layers(model, num_layers)
    is_fused = kernels.fla and any(map(is_gated_delta_net, model.modules()))
    is_loop = "linear_attention" in (getattr(text, "layer_types", None) or ()) and not is_fused
    spans = _TRACED_TOKENS if is_loop and num_tokens > _TRACED_TOKENS[1] else (num_tokens,)

    def trace(layers: int, tokens: int) -> Activations:
        part = model if layers == num_layers else build(_cut(config, layers))
        return _trace(part, tokens, autocast=autocast, checkpointing=checkpointing, kernels=kernels)

    # every figure is a constant, and parts that grow with layers, with tokens, and with both
    found = {layers: {tokens: trace(layers, tokens) for tokens in spans} for layers in few}

    def extend(name: str) -> int:
        at_layers = {
            layers: _extend({tokens: getattr(at, name) for tokens, at in row.items()}, num_tokens)
            for layers, row in found.items()
        }
        return round(_extend(at_layers, num_layers))

    return Activations(**{name: extend(name) for name in ("saved", "copies", "forward_peak", "backward_peak")})


def _choose_layers(model: nn.Module, num_layers: int) -> tuple[int, ...]:
    """Choose two numbers of first layers with each kind in the model's proportion, or all where layers are not alike.

    Layers are of a kind that have parameters of the same names, shapes and dtypes.
    """
    shapes: list[list[Any]] = [[] for _ in range(num_layers)]
    for name, weight in model.named_parameters():
        place = re.search(r"\blayers\.(\d+)\.(.+)", name)
        if place is not None and int(place[1]) < num_layers:
            shapes[int(place[1])].append((place[2], weight.shape, weight.dtype))
    period = next(p for p in range(1, num_layers + 1) if shapes[p:] == shapes[:-p])
    few = period * ceil(2 / period)
    return (few, 2 * few) if 2 * few < num_layers else (num_layers,)


def _cut(config: Any, num_layers: int) -> Any:
    """Cut a model's configuration to its first layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return config


def _extend(values: dict[int, float], at: int) -> float:
    """Extrapolate the line through two points, or take the value at the only one."""
    (x0, y0), (x1, y1) = min(values.items()), max(values.items())
    return y0 if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _trace(
    model: Any, num_tokens: int, *, autocast: bool, checkpointing: bool, kernels: Kernels = IN_TORCH
) -> Activations:
    is_adapted = hasattr(model, "peft_config")
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        if is_adapted:
            model.enable_input_require_grads()
    fuse_adapters(model)
    layout = _lay_out(model, num_tokens) if kernels.fla else None
    # a GPU's kernels would be called on tensors that have no memory
    with FakeTensorMode(), computed_in_torch(model), computed_with(kernels, model):
        _give_shapes(model)
        live = _LiveBytes()
        for tensor in (*model.parameters(), *model.buffers()):
            live.ignore(tensor)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_drop_gradient)
        base = (model.get_base_model() if is_adapted else model).base_model
        with live:
            ids = torch.zeros(1, num_tokens, dtype=torch.int64)
            positions = torch.arange(num_tokens)[None]
            row = {} if layout is None else {"layout": layout}
            # the arithmetic of a GPU's autocast: the same operations are lowered
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                hidden = base(input_ids=ids, position_ids=positions, use_cache=False, **row).last_hidden_state
                with_copies = live.now
            saved, forward_peak = live.now, live.peak
            live.peak = live.now
            hidden.backward(torch.empty_like(hidden))
            return Activations(
                saved=saved, copies=with_copies - saved, forward_peak=forward_peak, backward_peak=live.peak
            )


def _lay_out(model: nn.Module, num_tokens: int) -> Layout:
    """Lay out one row, with the plans of gated delta nets, which could not be made on tensors without data."""
    wrap_linear_attention(model)
    layout = build_layout([np.zeros(num_tokens, dtype=np.int64)], share_prefixes=False)
    for net in filter(is_gated_delta_net, model.modules()):
        plan_layout(layout, net.conv_kernel_size - 1, torch.device("cpu"))
    return layout


def _give_shapes(model: nn.Module) -> None:
    """Move a model from the meta device to tensors without data that count as the CPU's, where autocast works."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                shaped = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad)
                module._parameters[name] = moved.setdefault(id(weight), shaped)  # tied weights stay tied
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside it make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def ignore(self, tensor: Tensor) -> None:
        self._sizes[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
