"""Faults of an optimizer step, on one rank and on two: what is not finite, or of no rows, moves nothing."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from launch import run_worker

ONCE = ("nan loss", "infinite gradient", "infinite gradient, unclipped", "infinite gradient, late")


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank, by case; the fault is on the last rank."""
    out = tmp_path_factory.mktemp("guard")
    run_worker("guard_worker.py", str(out), processes=request.param)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(request.param)]


def moved(case: dict[str, Any], what: str = "weights") -> list[bool]:
    """Return for each step whether it changed them, by a bit."""
    return [before[what] != after[what] for before, after in pairwise(case["steps"])]


def logged(case: dict[str, Any], key: str) -> list[float]:
    return [entry[key] for entry in case["log"]]


@pytest.mark.parametrize("name", ONCE)
def test_a_fault_on_one_rank_costs_that_step_on_all(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        case = rank[name]
        assert moved(case) == moved(case, "state") == [True, False, True, True]
        assert logged(case, "polar/skipped_steps") == [0, 1, 0, 0]
        rates = logged(case, "learning_rate")
        assert rates[1] == rates[2] and rates[0] > rates[1] > rates[3]
        assert case["steps"][-1] == ranks[0][name]["steps"][-1]
    assert not math.isfinite(logged(ranks[-1][name], "grad_norm")[1])


def test_the_log_says_nan_where_the_loss_was_and_not_after(ranks: list[dict[str, Any]]) -> None:
    losses = logged(ranks[0]["nan loss"], "loss")
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]
    assert all(map(math.isfinite, ranks[0]["nan loss"]["train_loss"]))


@pytest.mark.parametrize("name", ["no rows", "no rows, accumulated"])
def test_a_step_without_rows_leaves_weights_moments_and_learning_rate(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        case = rank[name]
        assert moved(case) == moved(case, "state") == [True, False, True, True]
        assert logged(case, "polar/skipped_steps") == [0, 0, 0, 0]  # nothing was wrong
        assert logged(case, "learning_rate")[1] == logged(case, "learning_rate")[2]


def test_faults_that_are_not_in_a_row_end_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["two apart"]["error"] is None
        assert moved(rank["two apart"]) == [False, False, True, False, False, True]


def test_several_in_a_row_end_the_run_before_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        case = rank["three in a row"]  # and a step without rows between them, which changes nothing
        assert "optimizer step 5 cannot be made, nor could the 2 before it: its loss is not finite" in case["error"]
        assert "r0, r1, r2, r3, r4, r5, r6, r7" in case["error"]  # the rollouts of all ranks
        assert case["checkpoints"] == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
        assert case["final"]["is_finite"] and case["final"] == case["steps"][1]


def test_weights_that_a_step_spoiled_end_the_run_before_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "optimizer step 1 made weights that are not finite" in rank["spoiled weights"]["error"]
        assert rank["spoiled weights"]["checkpoints"] == []


def test_a_step_without_rows_is_nothing_to_a_gradient_scaler(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        case = rank["float16, no rows"]
        assert moved(case) == [False, True, False, True]
        assert case["scale"] == 65536.0


def test_a_scale_that_is_being_lowered_ends_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        case = rank["float16, overflow"]
        skipped = logged(case, "polar/skipped_steps")
        assert case["error"] is None
        assert skipped[:4] == [1.0] * 4 and 0.0 in skipped
        assert moved(case) == [not skip for skip in skipped]
        assert case["scale"] == 2.0 ** (26 - sum(skipped))


def test_a_loss_that_is_not_finite_has_nothing_to_do_with_the_scale(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "optimizer step 4 cannot be made" in rank["float16, nan loss"]["error"]
        assert rank["float16, nan loss"]["final"] == rank["float16, nan loss"]["steps"][1]
