"""Rollouts are dealt to windows whole, and alike on every rank."""

from types import SimpleNamespace
from typing import Any

import pytest

from polar_trl.grpo.packing.packer import deal_rollouts


@pytest.mark.parametrize("num_windows", [1, 2, 3, 5])
def test_each_row_is_in_one_window_beside_the_others_of_its_rollout(num_windows: int) -> None:
    rows: list[Any] = [SimpleNamespace(rollout_id=f"r{number % 4}") for number in range(10)]
    windows = deal_rollouts(rows, num_windows, seed=3)
    assert len(windows) == num_windows
    assert sorted(index for window in windows for index in window) == list(range(10))
    of_window = [{rows[index].rollout_id for index in window} for window in windows]
    assert sum(len(rollouts) for rollouts in of_window) == 4
    assert max(map(len, of_window)) - min(map(len, of_window)) <= 1
    assert deal_rollouts(rows, num_windows, seed=3) == windows
