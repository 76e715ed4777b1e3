"""Plan the micro-batches of a step: bin packing of rows by predicted cost, so that all ranks finish together.

The heuristic is longest-processing-time-first (LPT; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969), then
local search: rows of the slowest rank are moved or swapped while that makes it faster. What is new to both is that the
cost of a row depends on its company, as a micro-batch forwards a common prefix once. Four rows of five tokens on two
ranks, a letter for a token, at a cost of 1 per token:

    0  s s s s a      1  s s s s b      2  t t t t u      3  t t t t v

LPT places row 0 on rank 0, at a cost of 5. Beside it, row 1 has a marginal cost of 1 and would end rank 0 at 6; alone
on rank 1 it ends that rank at 5, so it goes there, and rows 2 and 3 part likewise: loads 10 and 10, both prefixes
forwarded twice. The loads are equal, so the local search ends at once, although a swap of rows 1 and 2 would give 6
and 6. So LPT also runs on prefix clusters, neighbours in sorted order that share at least half of their cost and stay
together: {0, 1} and {2, 3} cost 6 each, and loads are 6 and 6. Several limits on the size of a cluster are tried, and
the plan whose slowest rank costs least is taken.

Every rank gets the same number of micro-batches, since collectives wait for all. The plan is a function of its input
alone (no random numbers, no clock), so that each rank may compute its own.
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
"""A load this near to the best, relative to it, is not improved further."""
_MAX_EVALUATIONS = 16_384
"""Bounds the local search: each of its steps evaluates the marginal cost of every cluster on every rank."""
_MAX_TRIALS = 8
"""Swaps are ranked by estimates, since the two clusters may share a prefix; so many of the best are tried."""
_CLUSTER_SHARES = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Limits on the cost of a cluster of several rows, in parts of a rank's fair load; 0: every row is its own cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predict the cost of a forward, in any unit: forward and backward take the same multiple of both terms."""

    per_token: float
    per_pair: float
    """Of a query and a key (in its context, or itself), over all layers."""

    @classmethod
    def of(cls, config: Any, num_parameters: int) -> Self:
        """Count the FLOPs of a forward: 2 per parameter and token, and 4 x layers x heads x head size per pair.

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
        """Return the cost of a segment, or of each of several.

        Args:
            num_tokens: n, of the segment.
            depth: d, the tokens before it in its context.

        Returns:
            per_token * n + per_pair * (n * d + n * (n + 1) / 2).
        """
        # each of the n tokens sees the d before the segment, and 1, 2, ... n of the segment itself
        pairs = num_tokens * depth + num_tokens * (num_tokens + 1) / 2
        return self.per_token * num_tokens + self.per_pair * pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Rows over W ranks and M micro-batches each."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[W][M] indices of rows, a rank's most expensive micro-batch first: FSDP and ZeRO-3 wait for the k-th of all
    ranks, which are alike so. A rank that has fewer than M ends with empty ones."""
    costs_W: tuple[float, ...]
    """Predicted cost of each rank."""
    lower_bound: float
    """No split has a lower `cost`: the mean over ranks if every shared prefix were forwarded once, or the cost of the
    most expensive row."""
    forwarded_tokens: int
    """Over all ranks; a prefix counts once in each micro-batch that shares it."""
    unique_tokens: int
    """Tokens of the prefix tree of all rows: each shared prefix once."""

    @property
    def cost(self) -> float:
        """Of the step: that of the rank on which the others wait (the makespan)."""
        return max(self.costs_W)

    @property
    def num_micro_batches(self) -> int:
        """M"""
        return len(self.micro_batches[0])


def plan_micro_batches(
    rows: Sequence[Ids], *, num_ranks: int, max_tokens: int, share_prefixes: bool, cost: CostModel
) -> Plan:
    """Spread rows over ranks and micro-batches, by LPT and local search over prefix clusters of several sizes.

    Args:
        rows: Token ids of each row, the rows of all ranks.
        max_tokens: Most tokens of a micro-batch, shared prefixes counted once; a row that is longer runs alone.
        share_prefixes: A prefix that rows of a micro-batch have in common is forwarded once.

    Returns:
        The plan; each row is in it once.

    Raises:
        ConfigError: `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens_per_device is {max_tokens}: give the tokens of a micro-batch, at least 1")
    order, lcps = sort_by_prefix(rows)
    unique_tokens = sum(len(row) for row in rows) - sum(lcps)
    if share_prefixes:
        order, lcps = _set_apart_long(rows, order, lcps, max_tokens)
    lengths_B = np.array([len(rows[row]) for row in order], dtype=np.int64)
    lcps_B = np.array(lcps if share_prefixes else [0] * len(lcps), dtype=np.int64)
    costs_B: Costs = cost.cost_of(lengths_B)
    fair_load = float((costs_B - cost.cost_of(lcps_B)).sum()) / num_ranks
    lower_bound = max(fair_load, max(costs_B.tolist(), default=0.0))
    best: _Bins | None = None
    for share in _CLUSTER_SHARES if lcps_B.any() else (0.0,):
        clusters = _build_clusters(lengths_B, lcps_B, cost, max_cost=share * fair_load, max_tokens=max_tokens)
        bins = _Bins(clusters, num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)
        _place_longest_first(bins)
        _search_locally(bins)
        if best is None or bins.loads_W.max() < best.loads_W.max():
            best = bins
        if best.loads_W.max() <= (1 + _TOLERANCE) * lower_bound:
            break
    assert best is not None
    filled = [[tuple(order[row] for row in batch) for batch in batches] for batches in best.build()]
    num_micro_batches = max(map(len, filled))
    return Plan(
        micro_batches=tuple((*batches, *[()] * (num_micro_batches - len(batches))) for batches in filled),
        costs_W=tuple(best.loads_W.tolist()),
        lower_bound=lower_bound,
        forwarded_tokens=best.num_tokens,
        unique_tokens=unique_tokens,
    )


def _set_apart_long(
    rows: Sequence[Ids], order: list[int], lcps: list[int], max_tokens: int
) -> tuple[list[int], list[int]]:
    """Move the rows that run alone to the end of the order, where they share nothing; also return the new LCPs."""
    short, short_lcps, alone, bridge = [], [], [], 0
    for row, lcp in zip(order, lcps, strict=True):
        # the common prefix with the last short row: the least of the LCPs on the way from it
        bridge = min(bridge, lcp)
        if len(rows[row]) > max_tokens:
            alone.append(row)
        else:
            short.append(row)
            short_lcps.append(bridge)
            bridge = max_tokens  # at least as long as this row, so that the next LCP decides
    return short + alone, short_lcps + [0] * len(alone)


@dataclass(frozen=True, slots=True)
class _Clusters:
    """U prefix clusters: runs of lexicographic neighbours, whose rows stay in one micro-batch."""

    edges: tuple[int, ...]
    """[U + 1] rows at which clusters begin, and the end."""
    tokens_U: Ids
    """Of the cluster's prefix tree."""
    costs_U: Costs
    lcp_before_U: Ids
    """Longest common prefix of the cluster's first row and the last row of the cluster before."""
    lcp_within_U: Ids
    """Of its first row and its last, and so of all its rows."""


def _build_clusters(lengths_B: Ids, lcps_B: Ids, cost: CostModel, *, max_cost: float, max_tokens: int) -> _Clusters:
    """Join each row to the one before if they share at least half of the cost, up to a cost and a token budget.

    Half of the more expensive one: the first call of a session is nearly all system prompt, but does not belong to
    the longest call of the session before.
    """
    costs_B: Costs = cost.cost_of(lengths_B)
    shared_costs_B: Costs = cost.cost_of(lcps_B)
    edges = [0]
    tokens: list[int] = []
    costs: list[float] = []
    within: list[int] = []
    for row in range(len(lengths_B)):
        more_tokens, more_cost = int(lengths_B[row] - lcps_B[row]), float(costs_B[row] - shared_costs_B[row])
        if (
            row > 0
            and 2 * shared_costs_B[row] >= max(costs_B[row - 1], costs_B[row])
            and tokens[-1] + more_tokens <= max_tokens
            and costs[-1] + more_cost <= max_cost
        ):
            tokens[-1] += more_tokens
            costs[-1] += more_cost
            within[-1] = min(within[-1], int(lcps_B[row]))
            edges[-1] = row + 1
        else:
            tokens.append(int(lengths_B[row]))
            costs.append(float(costs_B[row]))
            within.append(int(lengths_B[row]))
            edges.append(row + 1)
    return _Clusters(
        edges=tuple(edges),
        tokens_U=np.array(tokens, dtype=np.int64),
        costs_U=np.array(costs),
        lcp_before_U=lcps_B[edges[:-1]] if len(lcps_B) else lcps_B,
        lcp_within_U=np.array(within, dtype=np.int64),
    )


class _Bins:
    """Micro-batches being filled with clusters, in any order: tokens and costs are right after each change."""

    def __init__(self, clusters: _Clusters, *, num_ranks: int, max_tokens: int, cost: CostModel) -> None:
        self.clusters, self._max_tokens, self._cost = clusters, max_tokens, cost
        self.bin_of_U = np.full(len(clusters.tokens_U), -1)
        self.loads_W: Costs = np.zeros(num_ranks)
        # an empty bin on every rank at all times, so that any cluster fits on each
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

    def marginal_cost(self, cluster: int) -> tuple[Costs, Ids]:
        """[W] what the cluster adds to each rank, and the bin there that shares most with it: of several the fullest.

        For a cluster that is placed already, this holds for the other ranks only.
        """
        shared_tokens, shared_costs = self._shared_with_bins(cluster)
        tokens = self._tokens + self.clusters.tokens_U[cluster] - shared_tokens
        usable = np.flatnonzero((self._sizes == 0) | (tokens <= self._max_tokens))
        usable = usable[np.lexsort((-self._tokens[usable], -shared_costs[usable]))]
        # the first of each rank in that order; there is one, as an empty bin is always usable
        _, first = np.unique(self._ranks[usable], return_index=True)
        bins_W = usable[first]
        return self.clusters.costs_U[cluster] - shared_costs[bins_W], bins_W

    def savings(self, cluster: int) -> float:
        """Return what its rank saves without the cluster: shared prefixes stay for the others."""
        return float(self.clusters.costs_U[cluster] - self._shared_with_bins(cluster)[1][self.bin_of_U[cluster]])

    def insert(self, cluster: int, bin: int) -> None:
        self._count(cluster, bin, +1)
        self.bin_of_U[cluster] = bin
        if self._sizes[bin] == 1:  # it was the rank's empty one
            self._ranks = np.append(self._ranks, self._ranks[bin])
            self._sizes = np.append(self._sizes, 0)
            self._tokens = np.append(self._tokens, 0)
            self._costs = np.append(self._costs, 0.0)

    def remove(self, cluster: int) -> None:
        self._count(cluster, int(self.bin_of_U[cluster]), -1)
        self.bin_of_U[cluster] = -1

    def build(self) -> list[list[list[int]]]:
        """Per rank its bins that have rows, the most expensive first; rows in lexicographic order."""
        rows: dict[int, list[int]] = {}
        for bin, (first, end) in zip(self.bin_of_U.tolist(), pairwise(self.clusters.edges), strict=True):
            rows.setdefault(bin, []).extend(range(first, end))
        filled: list[list[list[int]]] = [[] for _ in self.loads_W]
        for bin in sorted(rows, key=lambda bin: (-self._costs[bin], bin)):
            filled[self._ranks[bin]].append(rows[bin])
        return filled

    def _count(self, cluster: int, bin: int, sign: int) -> None:
        shared_tokens, shared_costs = self._shared_with_bins(cluster)
        cost = sign * (self.clusters.costs_U[cluster] - shared_costs[bin])
        self._sizes[bin] += sign
        self._tokens[bin] += sign * (self.clusters.tokens_U[cluster] - shared_tokens[bin])
        self._costs[bin] += cost
        self.loads_W[self._ranks[bin]] += cost

    def _shared_with_bins(self, cluster: int) -> tuple[Ids, Costs]:
        """Tokens of the cluster, and their cost, that the other clusters of each bin hold already.

        Of a bin, those count that share most, one before the cluster in sorted order and one after. A prefix that
        both hold counts once: before + after - both.
        """
        before, after = np.zeros_like(self._tokens), np.zeros_like(self._tokens)
        lcp_before_U, lcp_within_U = self.clusters.lcp_before_U, self.clusters.lcp_within_U
        if lcp_before_U.any():
            # The common prefix with a farther cluster is the minimum of the LCPs between neighbours on the way there,
            # and of those within the clusters that are passed.
            hops = lcp_before_U[1 : cluster + 1].copy()
            hops[:-1] = np.minimum(hops[:-1], lcp_within_U[1:cluster])
            self._raise_to(before, slice(0, cluster), np.minimum.accumulate(hops[::-1])[::-1])
            hops = lcp_before_U[cluster + 1 :].copy()
            hops[1:] = np.minimum(hops[1:], lcp_within_U[cluster + 1 : -1])
            self._raise_to(after, slice(cluster + 1, None), np.minimum.accumulate(hops))
        # `before` is a prefix of the first row, `after` of the last: the same tokens as far as all rows are one
        both = np.minimum(np.minimum(before, after), lcp_within_U[cluster])
        costs = self._cost.cost_of(before) + self._cost.cost_of(after) - self._cost.cost_of(both)
        return before + after - both, costs

    def _raise_to(self, most: Ids, others: slice, shared: Ids) -> None:
        """Raise `most`, by bin, to the largest value of the clusters that are in the bin."""
        bins = self.bin_of_U[others]
        placed = bins >= 0
        np.maximum.at(most, bins[placed], shared[placed])


def _place_longest_first(bins: _Bins) -> None:
    """Place clusters by LPT: the most expensive first, each where the rank's load with it is least."""
    for cluster in np.argsort(-bins.clusters.costs_U, kind="stable").tolist():
        costs_W, bins_W = bins.marginal_cost(cluster)
        bins.insert(cluster, int(bins_W[np.argmin(bins.loads_W + costs_W)]))


def _search_locally(bins: _Bins) -> None:
    """Move clusters off the slowest rank, or swap them for cheaper ones, while that makes it faster."""
    for _ in range(_MAX_EVALUATIONS // max(1, len(bins.bin_of_U))):
        slowest = int(bins.loads_W.argmax())
        if bins.loads_W[slowest] <= (1 + _TOLERANCE) * bins.loads_W.mean():
            return
        if not any(_try(bins, move, slowest) for move in _propose(bins, slowest)):
            return


@dataclass(frozen=True, slots=True)
class _Move:
    cluster: int
    """Of the slowest rank."""
    target: int
    """The rank that it goes to."""
    partner: int | None
    """The cluster that comes from there in exchange."""


def _propose(bins: _Bins, slowest: int) -> list[_Move]:
    """List moves and swaps after which neither rank is as slow as the slowest is now, the best first."""
    loads_W, rank_of_U = bins.loads_W, bins.rank_of_U
    costs_UW = np.stack([bins.marginal_cost(cluster)[0] for cluster in range(len(rank_of_U))])
    savings_U = np.array([bins.savings(cluster) for cluster in range(len(rank_of_U))])
    mine, theirs = np.flatnonzero(rank_of_U == slowest), np.flatnonzero(rank_of_U != slowest)
    others = np.flatnonzero(np.arange(len(loads_W)) != slowest)
    # Rows of the matrix are the slowest rank's clusters. Columns are a move to each other rank, which brings nothing
    # back, then a swap with each cluster there.
    targets = np.concatenate([others, rank_of_U[theirs]])
    partners = np.concatenate([np.full(len(others), -1), theirs])
    saved_there = np.concatenate([np.zeros(len(others)), savings_U[theirs]])
    added_here = np.concatenate([np.zeros(len(others)), costs_UW[theirs, slowest]])
    after = np.maximum(
        loads_W[slowest] - savings_U[mine][:, None] + added_here,
        loads_W[targets] - saved_there + costs_UW[mine][:, targets],
    )
    moves = []
    for index in np.argsort(after, axis=None, kind="stable")[:_MAX_TRIALS].tolist():
        i, j = divmod(index, len(targets))
        if after[i, j] < loads_W[slowest]:
            partner = None if partners[j] < 0 else int(partners[j])
            moves.append(_Move(cluster=int(mine[i]), target=int(targets[j]), partner=partner))
    return moves


def _try(bins: _Bins, move: _Move, slowest: int) -> bool:
    """Make the move; undo it unless both ranks are then faster than the slowest was."""
    before = bins.loads_W[slowest] * (1 - 1e-9)  # a smaller gain is rounding, and could go back and forth
    moved = [move.cluster] if move.partner is None else [move.cluster, move.partner]
    homes = [int(bins.bin_of_U[cluster]) for cluster in moved]
    for cluster in moved:
        bins.remove(cluster)
    for cluster, rank in zip(moved, (move.target, slowest), strict=False):
        bins.insert(cluster, int(bins.marginal_cost(cluster)[1][rank]))
    if max(bins.loads_W[slowest], bins.loads_W[move.target]) < before:
        return True
    for cluster in moved:
        bins.remove(cluster)
    for cluster, home in zip(moved, homes, strict=True):
        bins.insert(cluster, home)
    return False
