"""Build the model that TRL would make of a configuration without memory: shapes and dtypes, and no data.

Its attention is a stand-in for FlexAttention that keeps for the backward pass what the kernel keeps.
"""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.autograd import Function
from transformers import AttentionInterface, AutoModelForCausalLM

_SHAPE_ATTENTION = "polar_shapes"


def build_meta_model(config: Any, *, dtype: torch.dtype, peft_config: Any = None) -> Any:
    """Build the model that TRL would make of this configuration, with an adapter if there is one, without memory.

    TRL takes the class that the configuration names (`trl.trainer.utils.create_model_from_path`).
    """
    config = copy.deepcopy(config)
    AttentionInterface.register(_SHAPE_ATTENTION, attend)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    make = named._from_config if named is not None else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype, attn_implementation=_SHAPE_ATTENTION)
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, copy.deepcopy(peft_config))
    return model


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Stand in for FlexAttention in transformers' calling convention: from [1, H, N, D] to [1, N, H, D]."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))  # as autocast does for attention
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


class _Attention(Function):
    """Saved: its inputs, its output, and one float32 per head and token to recompute weights from."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # the output lies in memory as the queries do
        same = query.shape[-1] == value.shape[-1]
        output = torch.empty_like(query) if same else value.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, normalizer = ctx.saved_tensors
        _delta = torch.empty_like(normalizer)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
