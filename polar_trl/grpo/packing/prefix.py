"""Forward a prefix that several passes share once per step, and read it from memory in all of them but one.

Agents begin every session with the same system prompt and tools, often half of its tokens. A tree has them once in
each pass; this has them twice in a step, however many passes there are. Three passes of rows that begin with p:

    fill    p            without gradients: each layer keeps p's keys and values (a gated delta net, its last
                         inputs of the convolution and its state)
    read    a b          the layers read what they kept; its gradients are added up over these passes
    read    c d
    close   p e f        p in the tree, as in any pass; the gradients of the passes before join those of e and f
                         where the layers of this pass compute what was kept, and flow on into the weights

That is the chain rule in another order, so it is exact as long as the weights, and so the pass that fills and the one
that closes, are the same: not with dropout. The gradients are summed in float32, whatever the layers compute in.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polar_trl.grpo.packing.layout import Ids, Layout, build_layout, sort_by_prefix

Part = tuple[int, int, int]
"""Dimension, first and length of a part of a tensor, as `Tensor.narrow` takes them."""
LEAST_TOKENS = 512
"""Of a prefix that is worth one more, shorter pass."""


class SharedPrefix:
    """A prefix of P tokens, and what the layers of a model keep of it during a step."""

    def __init__(self, token_ids: Ids) -> None:
        self.token_ids = token_ids
        self._kept: dict[nn.Module, list[Tensor]] = {}
        self._gradients: dict[tuple[nn.Module, int], Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """P"""
        return len(self.token_ids)

    @property
    def is_filled(self) -> bool:
        """True from `fill` to `clear`."""
        return bool(self._kept)

    @torch.no_grad()
    def fill(self, model: Any, device: torch.device) -> None:
        """Forward the prefix through the decoder of a causal language model that `prepare_model` has prepared."""
        layout = replace(build_layout([self.token_ids], share_prefixes=False), prefix=self, role="fill")
        model.get_decoder()(
            input_ids=torch.from_numpy(layout.token_ids_L).to(device)[None],
            position_ids=torch.from_numpy(layout.position_ids_L).to(device)[None],
            layout=layout,
            use_cache=False,
        )

    def clear(self) -> None:
        """Free what the layers kept, and its gradients."""
        self._kept.clear()
        self._gradients.clear()

    def read(self, module: nn.Module, index: int) -> Tensor:
        """Return what a layer kept under this index (0, 1, ... in the order of its calls of `hand_over`)."""
        return self._kept[module][index]

    def hand_over(self, layout: Layout, module: nn.Module, index: int, x: Tensor, part: Part) -> Tensor:
        """Keep a part of x, in the pass that fills; give it the gradients of the passes that read it, in the last.

        Args:
            part: What the tokens after the prefix need of x.

        Returns:
            x, which the layer has to go on with.
        """
        if layout.role == "fill":
            self._keep(module, index, x.narrow(*part))
        elif layout.role == "close" and (gradient := self._gradients.get((module, index))) is not None:
            # also in the recomputation of a checkpointed layer, which is then the one that has a backward pass
            passed: Tensor = _AddGradient.apply(x, gradient, part)
            return passed
        return x

    def _keep(self, module: nn.Module, index: int, x: Tensor) -> None:
        leaf = x.detach().clone().requires_grad_()

        def add_up(leaf: Tensor) -> None:
            assert leaf.grad is not None
            gradient, leaf.grad = leaf.grad, None
            if (module, index) in self._gradients:
                self._gradients[module, index].add_(gradient)
            else:
                self._gradients[module, index] = gradient.float()

        leaf.register_post_accumulate_grad_hook(add_up)
        self._kept.setdefault(module, []).append(leaf)


class _AddGradient(torch.autograd.Function):
    """The identity, whose gradient is that of the output plus a given one of a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, part: Part) -> Tensor:
        ctx.gradient, ctx.part = gradient, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].clone()
        total.narrow(*ctx.part).add_(ctx.gradient)
        return total, None, None


def attach_keys(module: nn.Module, layout: Layout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [1, H_kv, L, K] with those of the layout's prefix in front, if it reads one: P + L."""
    prefix = layout.prefix
    if prefix is None:
        return key, value
    if layout.num_before:
        key, value = (torch.cat([prefix.read(module, i), x], dim=2) for i, x in enumerate((key, value)))
    else:
        part = (2, 0, prefix.num_tokens)
        key, value = (prefix.hand_over(layout, module, i, x, part) for i, x in enumerate((key, value)))
    return key, value


def choose_prefix(passes: Sequence[Sequence[tuple[Ids, int]]], *, multiple: int) -> Ids | None:
    """Choose the prefix of which a rank's passes save most, or None.

    A pass costs four forwards of its tokens (one again for checkpointed layers, two for gradients), the one that fills
    one: of n passes with P tokens in common, that saves 4n - 5 forwards of P tokens.

    Args:
        passes: Token ids of each row of each pass, and the position of the row's first scored token. The token before
            that predicts it and is not part of a prefix: nothing of a prefix is scored.
        multiple: P is one of this.
    """
    rows = [(ids, first, number) for number, of_pass in enumerate(passes) for ids, first in of_pass]
    order, lcps = sort_by_prefix([ids for ids, _, _ in rows])
    best, most = None, 0
    for start in range(1, len(order)):
        # all rows that have in common what this one and its neighbor have: lcps is at least that on the way to them
        length = lcps[start]
        low, high = start - 1, start
        while low > 0 and lcps[low] >= length:
            low -= 1
        while high + 1 < len(order) and lcps[high + 1] >= length:
            high += 1
        members = [rows[order[place]] for place in range(low, high + 1)]
        length = min(length, *(first - 1 for _, first, _ in members)) // multiple * multiple
        saved = (4 * len({number for _, _, number in members}) - 5) * length
        if length >= LEAST_TOKENS and saved > most and len({number for _, _, number in members}) > 1:
            best, most = members[0][0][:length], saved
    return best


def has_dropout(model: nn.Module) -> bool:
    """Tell whether two forwards of the same tokens differ in training."""
    config = getattr(model, "config", None)
    if getattr(config, "attention_dropout", 0.0):
        return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
