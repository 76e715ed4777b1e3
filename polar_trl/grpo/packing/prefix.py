"""Forward a prefix that several passes share twice per step, not once in each of them.

Agents begin every session with the same system prompt and tools, often half of its tokens. A tree has them once in
each pass. Three passes of rows that begin with p:

    fill     p            without gradients: each layer keeps p's keys and values (a gated delta net the last inputs of
                          its convolution and its state)
    read     a b          layers read what they kept; its gradients are added up over these passes
    read     c d
    close    p e f        p in the tree, as in any pass; the gradients of the passes before join those of e and f where
                          its layers compute what was kept, and flow on into the weights

That is the chain rule in another order, so it is exact as long as both forwards of p are the same: not with dropout.
The gradients are summed in float32, whatever the layers compute in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polar_trl.grpo.packing.layout import Ids, Layout, build_layout, sort_by_prefix

LEAST_TOKENS = 512
"""Of a prefix that is worth one more, shorter pass."""


class SharedPrefix:
    """A prefix of P tokens, and what the layers of a model keep of it from its first pass to its last."""

    def __init__(self, token_ids: Ids) -> None:
        self.token_ids = token_ids
        self.kept: dict[tuple[nn.Module, int], Tensor] = {}
        """By layer, and by the number of the tensor in it."""

    def fill(self, model: Any, device: torch.device) -> None:
        """Forward the prefix through a causal language model that `prepare_model` has prepared, but for its LM head.

        If gradients are enabled, they are added up in `grad` of what is kept.
        """
        layout = replace(build_layout([self.token_ids], share_prefixes=False), prefix=self)
        with torch.no_grad():
            model.base_model(
                input_ids=torch.from_numpy(layout.token_ids_L).to(device)[None],
                position_ids=torch.from_numpy(layout.position_ids_L).to(device)[None],
                layout=layout,
                use_cache=False,
            )
        if torch.is_grad_enabled():
            for leaf in self.kept.values():
                leaf.requires_grad_()
                leaf.grad_dtype = torch.float32
                leaf.grad = torch.zeros_like(leaf, dtype=torch.float32)


@contextmanager
def keep_prefix(layout: Layout, model: Any, accelerator: Any) -> Iterator[None]:
    """Run a pass inside with the prefix of its layout, if it has one: kept from the first of its passes to the last.

    Args:
        model: The causal language model of the pass, in no wrapper.
    """
    prefix = layout.prefix
    if prefix is not None and not prefix.kept:
        with accelerator.autocast():
            prefix.fill(model, accelerator.device)
    yield
    if prefix is not None and layout.num_before == 0:
        prefix.kept.clear()


def apply_prefix(
    layout: Layout, module: nn.Module, index: int, x: Tensor, *, dim: int, part: tuple[int, int] | None = None
) -> Tensor:
    """Return the tensor that a layer goes on with in the place of x, of which later tokens of a row need a part.

    A pass that reads the prefix gets the part in front of its own x along `dim`. The pass that fills keeps it. The
    last one gives x the gradients of those that read.

    Args:
        index: Number of this tensor in the layer.
        part: First and length of the part along `dim`, where that is not the prefix's tokens.
    """
    prefix = layout.prefix
    if prefix is None:
        return x
    key = module, index
    if layout.num_before:
        return torch.cat([prefix.kept[key], x], dim=dim)
    start, length = part or (0, len(prefix.token_ids))
    if key not in prefix.kept:
        prefix.kept[key] = x.detach().narrow(dim, start, length).clone()
        return x
    gradient = prefix.kept[key].grad
    if gradient is None:  # a pass that is scored only
        return x
    passed: Tensor = _AddGradient.apply(x, gradient, (dim, start, length))
    return passed


class _AddGradient(torch.autograd.Function):
    """The identity, whose gradient is that of the output plus a given one of a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, part: tuple[int, int, int]) -> Tensor:
        ctx.gradient, ctx.part = gradient, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].clone()
        total.narrow(*ctx.part).add_(ctx.gradient)
        return total, None, None


def choose_prefix(
    passes: Sequence[Sequence[tuple[Ids, int]]], *, multiple: int, most_tokens: int | None = None
) -> Ids | None:
    """Choose the prefix of which a rank's passes save most, or None.

    A pass costs four forwards of its tokens (one again for checkpointed layers, two for gradients), the one that fills
    one: of n passes with P tokens in common, that saves 4n - 5 forwards of P tokens.

    Args:
        passes: Token ids of each row of each pass, and the position of the row's first scored token. The token before
            that predicts it and is not part of a prefix: nothing of a prefix is scored.
        multiple: P is one of this.
        most_tokens: P that there is memory for; None where that is not known.
    """
    rows = [(ids, first, number) for number, of_pass in enumerate(passes) for ids, first in of_pass]
    order, lcps = sort_by_prefix([ids for ids, _, _ in rows])
    best, most = None, 0
    for start in range(1, len(order)):
        # all rows that have in common what this one and its neighbor have: lcps is at least that on the way to them
        low, high = start - 1, start
        while low > 0 and lcps[low] >= lcps[start]:
            low -= 1
        while high + 1 < len(order) and lcps[high + 1] >= lcps[start]:
            high += 1
        members = [rows[order[place]] for place in range(low, high + 1)]
        length = min(lcps[start], *(first - 1 for _, first, _ in members))
        if most_tokens is not None:
            length = min(length, most_tokens)
        length = length // multiple * multiple
        num_passes = len({number for _, _, number in members})
        saved = (4 * num_passes - 5) * length
        if length >= LEAST_TOKENS and saved > most and num_passes > 1:
            best, most = members[0][0][:length], saved
    return best


def has_dropout(model: nn.Module) -> bool:
    """Tell whether two forwards of the same tokens differ in training."""
    if getattr(getattr(model, "config", None), "attention_dropout", 0.0):
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
