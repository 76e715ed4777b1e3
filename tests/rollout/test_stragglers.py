"""Stragglers are cut at a limit that the faster sessions of their batch set."""

import math

import pytest

from polar_trl.errors import ConfigError
from polar_trl.rollout.runner import RolloutConfig
from polar_trl.rollout.stragglers import StragglerCut


def test_the_slowest_of_the_quantile_sets_the_limit_for_good() -> None:
    cut = StragglerCut(4, 0.75)
    for seconds in (3.0, 9.0):
        cut.note(seconds)
        assert cut.limit_s == math.inf
    cut.note(5.0)
    assert cut.limit_s == 9.0
    cut.note(20.0)
    assert cut.limit_s == 9.0


def test_sessions_that_say_nothing_do_not_count() -> None:
    cut = StragglerCut(4, 0.5)
    for _ in range(2):
        cut.note(None)
    assert cut.limit_s == math.inf
    cut.note(7.0)
    assert cut.limit_s == 7.0


def test_only_failures_draw_no_limit() -> None:
    cut = StragglerCut(2, 0.5)
    cut.note(None)
    cut.note(None)
    assert cut.limit_s == math.inf


def test_without_a_quantile_nothing_is_cut() -> None:
    cut = StragglerCut(1, None)
    cut.note(1.0)
    assert cut.limit_s == math.inf


def test_a_share_that_no_float_holds_exactly() -> None:
    cut = StragglerCut(100, 0.07)
    for _ in range(7):
        cut.note(1.0)
    assert cut.limit_s == 1.0


@pytest.mark.parametrize("quantile", [0.0, 1.0, -0.5, 90])
def test_a_quantile_that_is_no_share_is_refused(quantile: float) -> None:
    with pytest.raises(ConfigError, match=rf"straggler_quantile is {quantile}: give a share between 0 and 1"):
        RolloutConfig(straggler_quantile=quantile)
