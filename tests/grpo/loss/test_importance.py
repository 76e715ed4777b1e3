"""Importance ratios are bounded as TRL does, and measured over the tokens of all ranks."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from polar_trl.grpo.loss.importance import RatioStats, bound_ratio

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[2.0, 0.5, 1.0]]),
        ("token_mask", [[0.0, 0.5, 1.0]]),
        ("sequence_truncate", [[2.0, 0.5, 1.0]]),
        ("sequence_mask", [[0.0, 0.5, 1.0]]),
    ],
)
def test_importance_ratios(mode: str, expected: list[list[float]]) -> None:
    bounds = {"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": 2.0}
    args = SimpleNamespace(vllm_importance_sampling_mode=mode, **bounds)
    assert bound_ratio(torch.tensor([[3.0, 0.5, 1.0]]).log(), args).allclose(torch.tensor(expected))


class OneRank:
    """Stands in for the part of accelerate that `RatioStats` calls, for one process."""

    device = CPU

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_ratio_figures_are_raw_and_of_the_masked_tokens_only() -> None:
    stats = RatioStats()
    sampling = torch.zeros(1, 3)
    stats.add(torch.tensor([[8.0, 0.5, 9.0]]).log(), sampling, torch.tensor([[1, 1, 0]]))
    stats.add(torch.tensor([[1.0, 1.0, 1.0]]).log(), sampling, torch.tensor([[1, 0, 1]]))
    figures = stats.summarize(OneRank(), clip_min=None, clip_max=3.0)
    expected = {
        "sampling_logp_difference/mean": (math.log(8) + math.log(2)) / 4,
        "sampling_logp_difference/p99": math.log(8),
        "sampling_logp_difference/max": math.log(8),
        "importance_sampling_ratio/mean": 10.5 / 4,
        "importance_sampling_ratio/min": 0.5,
        "importance_sampling_ratio/max": 8.0,
        "importance_sampling_ratio/outside_bounds": 0.25,
        "importance_sampling_ratio/effective_share": 10.5**2 / (4 * 66.25),
    }
    assert figures == pytest.approx(expected, rel=1e-6)


def test_no_tokens_have_no_figures() -> None:
    assert RatioStats().summarize(OneRank(), clip_min=None, clip_max=3.0) == {}


class ThreadRank:
    """One of two ranks, each a thread, whose collectives wait for the other."""

    device = CPU

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, torch.Tensor]) -> None:
        self._rank, self._barrier, self._board = rank, barrier, board

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._board[self._rank] = tensor
        self._barrier.wait(timeout=30)
        assert self._board[0].shape == self._board[1].shape  # what NCCL and Gloo need
        both = torch.cat([self._board[0], self._board[1]])
        self._barrier.wait(timeout=30)
        return both

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return self.gather(tensor[None]).sum(dim=0)


def _gap_figures(gaps_by_rank: list[torch.Tensor]) -> list[dict[str, float]]:
    """Report as two ranks whose tokens have these gaps (N_rank in nats, positive: the trainer is surer)."""
    barrier, board = threading.Barrier(2), dict[int, torch.Tensor]()

    def report(rank: int) -> dict[str, float]:
        stats = RatioStats()
        for part in gaps_by_rank[rank].split(1000):
            stats.add(part[None], torch.zeros(1, len(part)), torch.ones(1, len(part)))
        return stats.summarize(ThreadRank(rank, barrier, board), clip_min=None, clip_max=3.0)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(report, range(2)))


@pytest.mark.parametrize(
    ("num_here", "num_there", "place"),
    # the 99th percentile of n values is the value at the least place that is at least 0.99 n
    [(1, 0, 1), (100, 0, 99), (60, 41, 100), (7000, 3001, 9901), (2, 4000, 3962)],
)
def test_the_percentile_is_that_of_all_ranks_tokens(num_here: int, num_there: int, place: int) -> None:
    order = torch.randperm(num_here + num_there, generator=torch.Generator().manual_seed(0))
    gaps = (order + 1) / 4096  # 1, 2, ... of a unit that floats hold exactly, dealt to ranks at random
    first, second = _gap_figures([gaps[:num_here], -gaps[num_here:]])
    assert first == second
    assert first["sampling_logp_difference/p99"] == place / 4096
    assert first["sampling_logp_difference/max"] == (num_here + num_there) / 4096
    assert first["sampling_logp_difference/mean"] == pytest.approx((num_here + num_there + 1) / 2 / 4096)


def test_the_largest_gaps_may_all_be_on_one_rank() -> None:
    gaps = torch.arange(1, 1001) / 4096
    for figures in _gap_figures([gaps[:500], gaps[500:]]) + _gap_figures([gaps[500:], gaps[:500]]):
        assert figures["sampling_logp_difference/p99"] == 990 / 4096
