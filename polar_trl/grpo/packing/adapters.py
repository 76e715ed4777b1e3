"""Add a LoRA layer's product to its base layer's inside the matrix product.

PEFT multiplies the adapter's output by its scale and adds it to the layer's, and autograd adds the two gradients of
the input: four passes over tensors as wide as the layer, beside products that are narrow (rank 32 of 2,560). Here the
products add to their output as they write it (`addmm`). For inputs x [N, I], outputs y [N, O] and an inner h [N, R]:

    forward      y = x W^T               h = x A^T        y += s h B^T        saved: x, h
    backward    dx = dy W               dh = s dy B      dx += dh A
                dB = s dy^T h           dA = dh^T x
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear


def fuse_adapters(model: nn.Module) -> None:
    """Let PEFT's linear LoRA layers compute in this way wherever it is the same sum; all else stays PEFT's."""
    for module in model.modules():
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear):
            module._cast_input_dtype = MethodType(_cast_input, module)
            module.forward = MethodType(_forward, module)


def _cast_input(layer: Any, x: Any, dtype: torch.dtype) -> Any:
    """PEFT's own, spared a detour under autocast: weights of adapters are float32, so that each raises its input to
    float32, which autocast lowers again before it multiplies. Both copies are as large as the layer's input."""
    if isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type):
        return x
    return type(layer)._cast_input_dtype(layer, x, dtype)


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    name = _find_adapter(layer)
    if name is None or args or kwargs:
        result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return result
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    base = layer.base_layer
    first, second = layer.lora_A[name].weight, layer.lora_B[name].weight
    if base.weight.dtype != dtype or (first.dtype != dtype and not torch.is_autocast_enabled(device)):
        result = type(layer).forward(layer, x)
        return result
    inputs = x.to(dtype).reshape(-1, x.shape[-1])
    out: Tensor = _AdaptedLinear.apply(
        inputs, base.weight, base.bias, first.to(dtype), second.to(dtype), layer.scaling[name]
    )
    return out.view(*x.shape[:-1], -1)


def _find_adapter(layer: Any) -> str | None:
    """Return the only active adapter of a layer that is plain LoRA on a frozen, whole weight; else None."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or names[0] in layer.lora_variant:
        return None
    weight, dropout = layer.base_layer.weight, layer.lora_dropout[names[0]]
    is_plain = type(layer.base_layer) is nn.Linear and not weight.requires_grad and layer.lora_B[names[0]].bias is None
    # ZeRO-3 gathers a weight when its own module is called; dropout has a mask for each input
    return names[0] if is_plain and isinstance(dropout, nn.Identity) and not hasattr(weight, "ds_id") else None


class _AdaptedLinear(Function):
    """The products of one layer over [N, I]; see above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: float
    ) -> Tensor:
        hidden = x @ first.T
        ctx.save_for_backward(x, hidden, weight, first, second)
        ctx.scale = scale
        return linear(x, weight, bias).addmm_(hidden, second.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        x, hidden, weight, first, second = ctx.saved_tensors
        grad_hidden = (grad @ second).mul_(ctx.scale)
        grad_x = (grad @ weight).addmm_(grad_hidden, first) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_hidden.T @ x, (grad.T @ hidden).mul_(ctx.scale), None
