"""Measure whether the weights in the engine move as the optimizer's masters do, at every push.

    update ratio = sum |engine's weight now - at the last push| / sum |master now - at the last push|

It is 1, in expectation, where masters are rounded with random offsets, and near 0 where small steps round to nearest.
The norm is the sum of absolute values: a weight that moves by a hundredth of the grid's spacing is moved by a whole
spacing with a probability of one hundredth, which keeps that sum and multiplies the Euclidean norm by ten.
"""

from typing import Any

import torch
from torch import Tensor

NUM_SAMPLED = 1 << 22
"""Weights of a rank that are compared, drawn once: their last values are kept, 16 bytes for each."""


class UpdateRatio:
    """Compare moves of a sample of the weights in the engine and in the masters, from push to push."""

    def __init__(self) -> None:
        self._index: dict[str, Tensor] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._sums = torch.zeros(4, dtype=torch.float64)
        """Of the engine's moves, of the masters', of weights that changed in the engine, and of those looked at."""

    def choose(self, name: str, count: int, total: int, device: torch.device) -> Tensor:
        """Choose the positions of a parameter's weights that are compared, always the same.

        Args:
            count: Weights of the parameter.
            total: Weights of all parameters, of which `NUM_SAMPLED` are compared at most.
        """
        if name not in self._index:
            wanted = min(count, -(-count * NUM_SAMPLED // max(1, total)))
            index = torch.arange(count)
            if wanted < count:
                index = torch.randint(count, (wanted,), generator=torch.Generator().manual_seed(len(self._index)))
            self._index[name] = index.to(device)
        return self._index[name]

    def note(self, name: str, master: Tensor, pushed: Tensor) -> None:
        """Note a parameter's chosen weights, flat: in the master, and as the engine was given them."""
        master, pushed = master.detach().float().clone(), pushed.detach().float()
        if name in self._before:
            master_before, pushed_before = self._before[name]
            moved = pushed - pushed_before
            sums = [moved.abs().sum(), (master - master_before).abs().sum(), (moved != 0).sum()]
            self._sums += torch.tensor([*(value.item() for value in sums), len(moved)], dtype=torch.float64)
        self._before[name] = (master, pushed)

    def finish(self, accelerator: Any) -> dict[str, float]:
        """Return metrics of the push over all ranks (a collective); none where no master has moved since the last."""
        sums, self._sums = self._sums.to(accelerator.device), torch.zeros(4, dtype=torch.float64)
        engine, masters, changed, count = accelerator.reduce(sums, reduction="sum").tolist()
        if masters == 0:
            return {}
        return {"polar/update_ratio": engine / masters, "polar/changed_weights": changed / count}
