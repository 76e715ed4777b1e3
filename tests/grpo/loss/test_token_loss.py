"""Test law 5 on numbers: however rollouts are cut, laid out and spread over passes and ranks, the loss stays TRL's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_worker
from loss_table import CASES
from loss_worker import DIVIDED, LAYOUTS, SPLITS, list_loss_types
from preset_rows import SIZES, PresetRows, build_common, build_settings
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PackedGRPOConfig

pytestmark = pytest.mark.timeout(1800)  # three workers, one of four processes, before the first test
ARCHITECTURES = ("llama", "qwen3", "qwen3_5")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of processes, the sections that `loss_worker.py` names."""
    out = tmp_path_factory.mktemp("loss")
    for processes in (1, 2, 4):
        run_worker("loss_worker.py", str(out), processes=processes)
    return {processes: torch.load(out / f"{processes}.pt", weights_only=True) for processes in (1, 2, 4)}


@pytest.mark.parametrize(
    ("processes", "architecture", "layout", "loss_type"),
    [
        (processes, architecture, layout, loss_type)
        for processes in (1, 2, 4)
        for architecture in ARCHITECTURES
        for layout in LAYOUTS
        for loss_type in list_loss_types(architecture, layout, processes)
    ],
)
def test_loss_and_gradient_are_those_of_trl_on_one_padded_batch(
    results: dict[int, Any], architecture: str, layout: str, loss_type: str, processes: int
) -> None:
    trl_loss, trl_gradient, _ = results[1]["trl"][architecture, loss_type]
    assert trl_gradient.norm() > 1e-3
    evaluated = results[processes]["evaluation"][architecture, layout, loss_type]
    assert abs(evaluated - trl_loss) <= 1e-5 * abs(trl_loss)
    splits = results[processes]["training"][architecture, layout, loss_type]
    assert len(splits) == (len(SPLITS) + 2 if loss_type in DIVIDED else 2)
    for split, (loss, gradient) in splits.items():
        assert abs(loss - trl_loss) <= 1e-5 * abs(trl_loss), split
        assert (gradient - trl_gradient).norm() <= 1e-5 * trl_gradient.norm(), split


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_every_setting_is_computed_over_rollouts(results: dict[int, Any], number: int) -> None:
    """Loss, gradient and figures, each rollout cut in 2 and 3 rows, over passes and ranks, against TRL's one batch."""
    trl_loss, trl_gradient, trl_figures = results[1]["trl_table"][number]
    assert trl_gradient.norm() > 1e-3
    assert "3 parts" in results[1]["table"][number]
    for processes, sections in results.items():
        for split, (loss, gradient, figures) in sections["table"].get(number, {}).items():
            assert abs(loss - trl_loss) <= 1e-5 * max(abs(trl_loss), 0.1), (processes, split)
            assert (gradient - trl_gradient).norm() <= 1e-5 * trl_gradient.norm(), (processes, split)
            for name, value in trl_figures.items():
                if name not in ("clip_ratio/low_min", "clip_ratio/high_max"):  # extremes over rows
                    assert figures[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (processes, split, name)


def test_of_these_steps_many_keep_a_prefix_from_pass_to_pass(results: dict[int, Any]) -> None:
    assert len(results[1]["kept"]) > 100
    assert len(results[2]["kept"]) > 10


def test_the_table_meets_several_ranks(results: dict[int, Any]) -> None:
    for processes, least in ((2, 40), (4, 9)):
        together = [CASES[number].is_off_policy for number in results[processes]["table"]]
        assert len(together) >= least and 0 < sum(together) < len(together)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_is_the_mean_over_its_generations_that_have_rows(results: dict[int, Any], processes: int) -> None:
    both, first, second = results[processes]["generations"]
    assert both[0] == pytest.approx((first[0] + second[0]) / 2, rel=1e-5)
    assert (both[1] - (first[1] + second[1]) / 2).norm() <= 1e-5 * both[1].norm()
    assert (first[1] - results[1]["generations"][1][1]).norm() <= 1e-5 * first[1].norm()


def test_ranks_stay_equal_where_the_last_generation_of_a_step_has_no_rows(results: dict[int, Any]) -> None:
    first, second = results[2]["empty_last"]
    assert first == pytest.approx(second, rel=1e-12)
    before, after = first
    assert abs(after - before) > 1e-4


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_no_rows_at_all_are_no_loss(results: dict[int, Any], processes: int) -> None:
    found = results[processes]["nothing"]
    assert len(found) == {1: 9, 2: 4, 4: 1}[processes]
    assert set(found.values()) == {(0.0, 0.0)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_trl(results: dict[int, Any], architecture: str, layout: str) -> None:
    _, _, trl_logps = results[1]["trl"][architecture, "dapo"]
    logps = results[1]["logps"][architecture, layout]
    assert len(logps) > 200
    assert (logps - trl_logps).abs().max() <= 1e-5 * trl_logps.abs().max()


def test_a_loss_over_experts_is_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, output_router_logits=True))
    with pytest.raises(ConfigError, match="router_aux_loss_coef: 0"):
        PresetRows(model=model, args=PackedGRPOConfig(**build_settings(tmp_path)), **build_common())
