"""Law 5 on numbers: however rollouts are cut, laid out and spread over passes and ranks, the loss stays TRL's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_worker
from loss_table import CASES

from polar_trl.grpo.config import LOSS_TYPES

pytestmark = pytest.mark.timeout(1800)  # six workers, some of four processes, before the first tests


def load_results(tmp_path_factory: pytest.TempPathFactory, kind: str) -> dict[int, Any]:
    out = tmp_path_factory.mktemp(kind)
    for processes in (1, 2, 4):
        run_worker("loss_worker.py", str(out), kind, processes=processes)
    return {n: torch.load(out / f"{kind}-{n}.pt", weights_only=True) for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return load_results(tmp_path_factory, "layouts")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return load_results(tmp_path_factory, "table")


@pytest.mark.parametrize(
    ("processes", "architecture", "loss_type"),
    [
        *((1, "llama", loss_type) for loss_type in LOSS_TYPES),
        *((1, architecture, loss_type) for architecture in ("qwen3", "qwen3_5") for loss_type in LOSS_TYPES[:3]),
        *(
            (processes, architecture, loss_type)
            for processes in (2, 4)
            for architecture in ("llama", "qwen3", "qwen3_5")
            for loss_type in LOSS_TYPES[: 2 if processes > 2 else 3]
        ),
    ],
)
@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
def test_loss_and_gradient_are_those_of_trl_on_one_padded_batch(
    losses: dict[int, Any], architecture: str, layout: str, loss_type: str, processes: int
) -> None:
    trl_loss, trl_gradient, _ = losses[1][architecture, "trl", loss_type]
    assert trl_gradient.norm() > 1e-3
    evaluated = losses[processes][architecture, layout, loss_type, "evaluation"]
    assert abs(evaluated - trl_loss) <= 1e-5 * abs(trl_loss)
    splits = [key for key in losses[processes] if key[:3] == (architecture, layout, loss_type) and len(key) > 4]
    assert len(splits) == 6
    for split in splits:
        loss, gradient = losses[processes][split]
        assert abs(loss - trl_loss) <= 1e-5 * abs(trl_loss), split
        assert (gradient - trl_gradient).norm() <= 1e-5 * trl_gradient.norm(), split


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_every_setting_is_computed_over_rollouts(table: dict[int, Any], number: int) -> None:
    """Loss, gradient and figures, each rollout cut in 2 and 7 rows, over passes and ranks, against TRL's one batch."""
    trl_loss, trl_gradient, trl_figures = table[1][number, "trl"]
    assert trl_gradient.norm() > 1e-3
    found = {(n, key): value for n, results in table.items() for key, value in results.items() if key[0] == number}
    del found[1, (number, "trl")]
    assert (1, (number, 7)) in found
    for split, (loss, gradient, figures) in found.items():
        assert abs(loss - trl_loss) <= 1e-5 * max(abs(trl_loss), 0.1), split
        assert (gradient - trl_gradient).norm() <= 1e-5 * trl_gradient.norm(), split
        for name, value in trl_figures.items():
            if name not in ("clip_ratio/low_min", "clip_ratio/high_max"):  # extremes over rows
                assert figures[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (split, name)


def test_the_table_meets_several_ranks(table: dict[int, Any]) -> None:
    for processes, least in ((2, 40), (4, 9)):
        together = [CASES[number].is_off_policy for number, _ in table[processes]]
        assert len(together) >= least and 0 < sum(together) < len(together)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_is_the_mean_over_its_generations_that_have_rows(losses: dict[int, Any], processes: int) -> None:
    both, first, second = losses[processes]["generations"]
    assert both[0] == pytest.approx((first[0] + second[0]) / 2, rel=1e-5)
    assert (both[1] - (first[1] + second[1]) / 2).norm() <= 1e-5 * both[1].norm()
    assert (first[1] - losses[1]["generations"][1][1]).norm() <= 1e-5 * first[1].norm()


def test_ranks_stay_equal_where_the_last_generation_of_a_step_has_no_rows(tmp_path: Path) -> None:
    run_worker("empty_window_worker.py", str(tmp_path), processes=2)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == pytest.approx(ranks[1], rel=1e-12)
    before, after = ranks[0]
    assert abs(after - before) > 1e-4


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_no_rows_at_all_are_no_loss(losses: dict[int, Any], processes: int) -> None:
    found = [value for key, value in losses[processes].items() if key[-1] == "nothing"]
    assert found == [(0.0, 0.0)] * 9


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_5"])
def test_log_probabilities_are_those_of_trl(losses: dict[int, Any], architecture: str, layout: str) -> None:
    _, _, trl_logps = losses[1][architecture, "trl", "dapo"]
    logps = losses[1][architecture, layout]
    assert len(logps) > 200
    assert (logps - trl_logps).abs().max() <= 1e-5 * trl_logps.abs().max()
