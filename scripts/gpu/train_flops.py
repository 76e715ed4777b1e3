"""Count the floating-point operations of a training step from the shapes of a model and of its rows.

Model FLOPs are what the step has to compute, however it is done; a product with an [in, out] matrix counts 2 in out
per token. Layers that are computed twice count once; the second time is told apart (`recomputed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polar_trl.grpo.packing.linear_attention import is_gated_delta_net

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12}
"""Dense bfloat16 of the SXM cards: NVIDIA's data sheets of the H100 and the H200, 1,979 with sparsity, halved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Of one step over N tokens, S of them scored."""

    linear: float
    """Matrices of all layers. Forward 2 per weight and token, backward 2 for the gradient of the input, and 2 for that
    of the weight where it is trained (Kaplan et al. 2020, arXiv:2001.08361, section 2.1: 6 in all). So 4 for the
    frozen matrices under LoRA, and 6 for LoRA's own."""
    attention: float
    """Softmax attention: forward 4 D per head and pair of tokens, query and key, that attend (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B, over the causal pairs of each row alone: L (L + 1) / 2), backward twice that."""
    delta_rule: float
    """Gated delta rule in its recurrent form (Yang et al. 2024, arXiv:2412.06464, equation 10): per token and value
    head, what the state holds for the key, the update and the read-out are 2 K V each; backward twice that. What the
    chunked form computes beyond it does not count."""
    head: float
    """LM head, of scored tokens only: like `linear`."""
    recomputed: float
    """Not the model's: the forward pass of all layers again (gradient checkpointing), and of the head's tiles."""

    @property
    def model(self) -> float:
        return self.linear + self.attention + self.delta_rule + self.head

    @property
    def hardware(self) -> float:
        return self.model + self.recomputed


def count_flops(model: Any, row_lengths: Sequence[int], num_scored: int, *, checkpointed: float) -> Flops:
    """Of a step of a causal language model of transformers, with or without PEFT's LoRA.

    Args:
        checkpointed: Share of the layers that are computed again.

    Norms, activations, rotations, the short convolution and the optimizer are left out. With frozen embeddings the
    first layer's input has no gradient to compute, which is not subtracted.
    """
    config = model.config.get_text_config()
    num_tokens = sum(row_lengths)
    forward = backward = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            product = 2 * num_tokens * module.weight.numel()
            forward += product
            backward += product * (2 if module.weight.requires_grad else 1)
    delta_nets = [module for module in model.modules() if is_gated_delta_net(module)]
    attention = count_attention(config, config.num_hidden_layers - len(delta_nets), row_lengths)
    delta_rule = sum(6 * num_tokens * net.num_v_heads * net.head_k_dim * net.head_v_dim for net in delta_nets)
    weight = model.get_output_embeddings().weight
    head = 2 * num_scored * weight.numel()
    return Flops(
        linear=forward + backward,
        attention=3 * attention,
        delta_rule=3 * delta_rule,
        head=head * (3 if weight.requires_grad else 2),
        recomputed=checkpointed * (forward + attention + delta_rule) + head,
    )


def count_attention(config: Any, num_layers: int, row_lengths: Sequence[int]) -> int:
    """Of a forward pass."""
    pairs = sum(length * (length + 1) // 2 for length in row_lengths)
    return 4 * num_layers * config.num_attention_heads * config.head_dim * pairs


def find_peak() -> float | None:
    """FLOP per second that the card can do at most; None where that is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    is_sxm = not any(slower in name for slower in ("PCIe", "NVL"))
    return next((peak for card, peak in PEAK_FLOPS.items() if card in name and is_sxm), None)
