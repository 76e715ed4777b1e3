"""Rows of token ids -> which rank forwards which rows in which micro-batch, so that all ranks are done at one time.

Cost is predicted: what the tokens cost and what the (query, key) pairs of attention cost. It refuses to leave a rank
without a forward that another one runs: every rank has the same number of micro-batches, since collectives wait for
all. The plan is a function of its input alone (no random numbers, no clock), so that each rank may compute its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from polar_trl.errors import ConfigError
from polar_trl.grpo.packing.layout import Ids, sort_by_prefix

Costs = NDArray[np.float64]

_TOLERANCE = 0.005
"""What is this near to the best is left alone."""
_MAX_QUOTES = 16_384
"""Bounds the refinement: each of its steps asks for the price of every unit on every rank."""
_MAX_TRIALS = 8
"""Prices of two units at once are estimates where prefixes are shared; so many of the best are tried."""
_UNIT_SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Most that a unit of several rows may cost, in parts of a rank's fair load; 0: every row is a unit of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What a forward costs, in any unit: forward and backward take the same multiple of both terms."""

    per_token: float
    per_pair: float
    """Of a query and a key in its context, or itself, over all layers."""

    @classmethod
    def of(cls, config: Any, num_parameters: int) -> Self:
        """FLOPs of a forward: 2 per parameter and token, and 4 x layers x heads x head size per pair.

        One multiply-add per parameter, and two (QK and AV) per pair and channel: PaLM, appendix B
        (arXiv:2204.02311), which counts three times as many for forward and backward together. Layers whose
        attention is linear or has a window cost by tokens only.

        Args:
            config: Of a transformers model; a multimodal one's text part is taken.
            num_parameters: Without embeddings, which are looked up.

        Raises:
            ConfigError: The config lacks its heads or layers.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            num_heads = text.num_attention_heads
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
            layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        except AttributeError as error:
            raise ConfigError(
                f"the model's config ({type(text).__name__}) has no `{error.name}`, which predicts the cost of a "
                "forward: give CostModel(per_token=..., per_pair=...)"
            ) from error
        num_full = sum(kind == "full_attention" for kind in layer_types)
        return cls(per_token=2.0 * num_parameters, per_pair=4.0 * num_full * num_heads * head_dim)

    def cost_of(self, num_tokens: int | Ids, depth: int | Ids = 0) -> Any:
        """Cost of a segment, or of each of several.

        Args:
            num_tokens: n, of the segment.
            depth: d, the tokens before it in its context.

        Returns:
            per_token * n + per_pair * (n * d + n * (n + 1) / 2).
        """
        pairs = num_tokens * depth + num_tokens * (num_tokens + 1) / 2
        return self.per_token * num_tokens + self.per_pair * pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Rows over R ranks and K micro-batches each."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[R][K] indices of rows, a rank's dearest micro-batch first: the k-th of all ranks, which FSDP and ZeRO-3 make
    wait for each other, are alike. A rank that has fewer than K ends with empty ones."""
    costs_R: tuple[float, ...]
    """Predicted cost of each rank."""
    lower_bound: float
    """No split has a lower `cost`: the mean over ranks if nothing that may be shared were forwarded twice, or what the
    dearest row costs."""
    forwarded_tokens: int
    """Over all ranks; a prefix counts once in each micro-batch that shares it."""
    unique_tokens: int
    """Tokens of the forest of all rows: each shared prefix once."""

    @property
    def cost(self) -> float:
        """Of the step: that of the rank on which the others wait."""
        return max(self.costs_R)

    @property
    def num_micro_batches(self) -> int:
        """K"""
        return len(self.micro_batches[0])


def plan_micro_batches(
    rows: Sequence[Ids], *, num_ranks: int, max_tokens: int, share_prefixes: bool, cost: CostModel
) -> Plan:
    """Spread rows over ranks and micro-batches.

    The dearest row first, each goes where the load and its own cost, less what it shares, are least; then rows of the
    slowest rank are moved or swapped while that helps. Where prefixes are shared, rows that share most of what they
    are may be better kept together: so that is tried as well, with units of several sizes, and the best plan taken.

    Args:
        rows: Token ids of each row, the rows of all ranks.
        max_tokens: Most tokens of a micro-batch, shared prefixes counted once; a row that is longer runs alone.
        share_prefixes: What rows of a micro-batch begin with in common is forwarded once.

    Returns:
        The plan; each row is in it once.

    Raises:
        ConfigError: `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens_per_device is {max_tokens}: give the tokens of a micro-batch, at least 1")
    order, common = sort_by_prefix(rows)
    unique_tokens = sum(len(row) for row in rows) - sum(common)
    if share_prefixes:
        order, common = _set_apart_long(rows, order, common, max_tokens)
    lengths_B = np.array([len(rows[row]) for row in order], dtype=np.int64)
    shared_B = np.array(common if share_prefixes else [0] * len(common), dtype=np.int64)
    costs_B: Costs = cost.cost_of(lengths_B)
    fair_load = float((costs_B - cost.cost_of(shared_B)).sum()) / num_ranks
    lower_bound = max(fair_load, max(costs_B.tolist(), default=0.0))
    best: _Bins | None = None
    for share in _UNIT_SHARES if shared_B.any() else (0.0,):
        units = _build_units(lengths_B, shared_B, cost, max_cost=share * fair_load, max_tokens=max_tokens)
        bins = _Bins(units, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
        _fill(bins)
        _refine(bins)
        if best is None or bins.loads_R.max() < best.loads_R.max():
            best = bins
        if best.loads_R.max() <= (1 + _TOLERANCE) * lower_bound:
            break
    assert best is not None
    filled = [[tuple(order[row] for row in batch) for batch in batches] for batches in best.build()]
    num_micro_batches = max(map(len, filled))
    return Plan(
        micro_batches=tuple((*batches, *[()] * (num_micro_batches - len(batches))) for batches in filled),
        costs_R=tuple(best.loads_R.tolist()),
        lower_bound=lower_bound,
        forwarded_tokens=best.num_tokens,
        unique_tokens=unique_tokens,
    )


def _set_apart_long(
    rows: Sequence[Ids], order: list[int], common: list[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """The order with the rows that run alone at its end, sharing nothing."""
    short, shared, alone, through = [], [], [], 0
    for row, tokens in zip(order, common, strict=True):
        through = min(through, tokens)
        if len(rows[row]) > max_tokens:
            alone.append(row)
        else:
            short.append(row)
            shared.append(through)
            through = max_tokens  # whatever the next ones share with this one
    return short + alone, shared + [0] * len(alone)


@dataclass(frozen=True, slots=True)
class _Units:
    """U runs of lexicographic neighbours; the rows of a unit stay in one micro-batch."""

    edges: tuple[int, ...]
    """[U + 1] rows at which units begin, and the end."""
    tokens_U: Ids
    """Of the unit's forest."""
    costs_U: Costs
    common_U: Ids
    """Tokens that the first row shares with the last row of the unit before."""
    through_U: Ids
    """Tokens that the first row and the last share."""


def _build_units(lengths_B: Ids, common_B: Ids, cost: CostModel, *, max_cost: float, max_tokens: int) -> _Units:
    """Join rows to the one before of which at least half the cost is shared, up to a cost and a token budget.

    Half of the dearer one: the first call of a session is nearly all system prompt, but does not belong to the
    longest call of the session before.
    """
    costs_B: Costs = cost.cost_of(lengths_B)
    shared_costs_B: Costs = cost.cost_of(common_B)
    edges = [0]
    tokens: list[int] = []
    costs: list[float] = []
    through: list[int] = []
    for row in range(len(lengths_B)):
        more_tokens, more_cost = int(lengths_B[row] - common_B[row]), float(costs_B[row] - shared_costs_B[row])
        if (
            row > 0
            and 2 * shared_costs_B[row] >= max(costs_B[row - 1], costs_B[row])
            and tokens[-1] + more_tokens <= max_tokens
            and costs[-1] + more_cost <= max_cost
        ):
            tokens[-1] += more_tokens
            costs[-1] += more_cost
            through[-1] = min(through[-1], int(common_B[row]))
            edges[-1] = row + 1
        else:
            tokens.append(int(lengths_B[row]))
            costs.append(float(costs_B[row]))
            through.append(int(lengths_B[row]))
            edges.append(row + 1)
    return _Units(
        edges=tuple(edges),
        tokens_U=np.array(tokens, dtype=np.int64),
        costs_U=np.array(costs),
        common_U=common_B[edges[:-1]] if len(common_B) else common_B,
        through_U=np.array(through, dtype=np.int64),
    )


class _Bins:
    """Micro-batches being filled with units, which may come and go in any order: tokens and costs are always right."""

    def __init__(self, units: _Units, *, num_ranks: int, max_tokens: int, cost: CostModel) -> None:
        self.units, self._max_tokens, self._cost = units, max_tokens, cost
        self.bin_of_U = np.full(len(units.tokens_U), -1)
        self.loads_R: Costs = np.zeros(num_ranks)
        # An empty bin on every rank at all times, so that a unit has a place on each.
        self._ranks = np.arange(num_ranks)
        self._sizes = np.zeros(num_ranks, dtype=np.int64)
        self._tokens = np.zeros(num_ranks, dtype=np.int64)
        self._costs: Costs = np.zeros(num_ranks)

    @property
    def num_tokens(self) -> int:
        return int(self._tokens.sum())

    @property
    def rank_of_U(self) -> Ids:
        return self._ranks[self.bin_of_U]

    def quote(self, unit: int) -> tuple[Costs, Ids]:
        """What the unit would cost on each rank, and the bin there that makes it so cheap: of several the fullest."""
        shared_tokens, shared_costs = self._shared_with_bins(unit)
        tokens = self._tokens + self.units.tokens_U[unit] - shared_tokens
        usable = np.flatnonzero((self._sizes == 0) | (tokens <= self._max_tokens))
        usable = usable[np.lexsort((-self._tokens[usable], -shared_costs[usable]))]
        _, first = np.unique(self._ranks[usable], return_index=True)
        bins_R = usable[first]
        return self.units.costs_U[unit] - shared_costs[bins_R], bins_R

    def gain_of(self, unit: int) -> float:
        """What its rank saves without the unit."""
        return float(self.units.costs_U[unit] - self._shared_with_bins(unit)[1][self.bin_of_U[unit]])

    def insert(self, unit: int, bin: int) -> None:
        self._count(unit, bin, +1)
        self.bin_of_U[unit] = bin
        if self._sizes[bin] == 1:
            self._ranks = np.append(self._ranks, self._ranks[bin])
            self._sizes = np.append(self._sizes, 0)
            self._tokens = np.append(self._tokens, 0)
            self._costs = np.append(self._costs, 0.0)

    def remove(self, unit: int) -> None:
        self._count(unit, int(self.bin_of_U[unit]), -1)
        self.bin_of_U[unit] = -1

    def build(self) -> list[list[list[int]]]:
        """Per rank its bins that have rows, the dearest first; rows in lexicographic order."""
        rows: dict[int, list[int]] = {}
        for bin, (first, end) in zip(self.bin_of_U.tolist(), pairwise(self.units.edges), strict=True):
            rows.setdefault(bin, []).extend(range(first, end))
        filled: list[list[list[int]]] = [[] for _ in self.loads_R]
        for bin in sorted(rows, key=lambda bin: (-self._costs[bin], bin)):
            filled[self._ranks[bin]].append(rows[bin])
        return filled

    def _count(self, unit: int, bin: int, sign: int) -> None:
        shared_tokens, shared_costs = self._shared_with_bins(unit)
        cost = sign * (self.units.costs_U[unit] - shared_costs[bin])
        self._sizes[bin] += sign
        self._tokens[bin] += sign * (self.units.tokens_U[unit] - shared_tokens[bin])
        self._costs[bin] += cost
        self.loads_R[self._ranks[bin]] += cost

    def _shared_with_bins(self, unit: int) -> tuple[Ids, Costs]:
        """Tokens, and their cost, of the unit that are in each bin without it.

        In a bin the unit has a neighbour before and one after, with which it shares the most. It brings what it has
        in common with either, less what those two have in common and it repeats.
        """
        units = self.units
        before, after = np.zeros_like(self._tokens), np.zeros_like(self._tokens)
        if units.common_U.any():
            # Tokens shared with ever farther units: no more than any step on the way and any unit on the way lets by.
            steps = np.minimum(units.common_U[1:], units.through_U[1:])[:unit]
            steps[-1:] = units.common_U[unit : unit + 1][: len(steps)]
            self._take_most(before, slice(0, unit), np.minimum.accumulate(steps[::-1])[::-1])
            steps = np.minimum(units.common_U[1:], units.through_U[:-1])[unit:]
            steps[:1] = units.common_U[unit + 1 : unit + 2]
            self._take_most(after, slice(unit + 1, None), np.minimum.accumulate(steps))
        twice = np.minimum(np.minimum(before, after), units.through_U[unit])
        costs = self._cost.cost_of(before) + self._cost.cost_of(after) - self._cost.cost_of(twice)
        return before + after - twice, costs

    def _take_most(self, most: Ids, others: slice, shared: Ids) -> None:
        bins = self.bin_of_U[others]
        placed = bins >= 0
        np.maximum.at(most, bins[placed], shared[placed])


def _fill(bins: _Bins) -> None:
    """The dearest unit first, each where load and its own cost are least."""
    for unit in np.argsort(-bins.units.costs_U, kind="stable").tolist():
        costs_R, bins_R = bins.quote(unit)
        bins.insert(unit, int(bins_R[np.argmin(bins.loads_R + costs_R)]))


def _refine(bins: _Bins) -> None:
    """Move units off the slowest rank, or swap them for cheaper ones, while that makes it faster."""
    for _ in range(_MAX_QUOTES // max(1, len(bins.bin_of_U))):
        slowest = int(bins.loads_R.argmax())
        if bins.loads_R[slowest] <= (1 + _TOLERANCE) * bins.loads_R.mean():
            return
        if not any(_try(bins, change, slowest) for change in _propose(bins, slowest)):
            return


@dataclass(frozen=True, slots=True)
class _Change:
    unit: int
    """Of the slowest rank."""
    target: int
    """The rank that it goes to."""
    partner: int | None
    """The unit that comes from there in exchange."""


def _propose(bins: _Bins, slowest: int) -> list[_Change]:
    """Changes that should help, the best first."""
    loads_R, rank_of_U = bins.loads_R, bins.rank_of_U
    quotes_UR = np.stack([bins.quote(unit)[0] for unit in range(len(rank_of_U))])
    gains_U = np.array([bins.gain_of(unit) for unit in range(len(rank_of_U))])
    mine, theirs = np.flatnonzero(rank_of_U == slowest), np.flatnonzero(rank_of_U != slowest)
    others = np.flatnonzero(np.arange(len(loads_R)) != slowest)
    # Columns: a move to each other rank, then a swap with each unit there.
    targets = np.concatenate([others, rank_of_U[theirs]])
    partners = np.concatenate([np.full(len(others), -1), theirs])
    given = np.concatenate([np.zeros(len(others)), gains_U[theirs]])
    taken = np.concatenate([np.zeros(len(others)), quotes_UR[theirs, slowest]])
    after = np.maximum(
        loads_R[slowest] - gains_U[mine][:, None] + taken,
        loads_R[targets] - given + quotes_UR[mine][:, targets],
    )
    changes = []
    for index in np.argsort(after, axis=None, kind="stable")[:_MAX_TRIALS].tolist():
        i, j = divmod(index, len(targets))
        if after[i, j] < loads_R[slowest]:
            partner = None if partners[j] < 0 else int(partners[j])
            changes.append(_Change(unit=int(mine[i]), target=int(targets[j]), partner=partner))
    return changes


def _try(bins: _Bins, change: _Change, slowest: int) -> bool:
    """Make the change; take it back if not both ranks are then faster than the slowest was."""
    before = bins.loads_R[slowest] * (1 - 1e-9)  # less than that is rounding, and could go back and forth
    moved = [change.unit] if change.partner is None else [change.unit, change.partner]
    homes = [int(bins.bin_of_U[unit]) for unit in moved]
    for unit in moved:
        bins.remove(unit)
    for unit, rank in zip(moved, (change.target, slowest), strict=False):
        bins.insert(unit, int(bins.quote(unit)[1][rank]))
    if max(bins.loads_R[slowest], bins.loads_R[change.target]) < before:
        return True
    for unit in moved:
        bins.remove(unit)
    for unit, home in zip(moved, homes, strict=True):
        bins.insert(unit, home)
    return False
