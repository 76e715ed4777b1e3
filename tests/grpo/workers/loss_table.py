"""List the settings of the loss that the config accepts, as cases to hold against TRL's own padded batch.

Loss types, levels of the importance ratio and modes of its correction in all their combinations, taken from the lists
by which the config refuses all else. Each combination meets one of the other settings alone, on-policy or after an
update, and all of them together after an update.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from polar_trl.grpo.config import CORRECTION_MODES, IMPORTANCE_LEVELS, LOSS_TYPES

OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_entropy_quantile": 0.4},
    {"off_policy_mask_threshold": 0.02},
    {"beta": 0.5},
    {"beta": 0.5, "use_bias_correction_kl": True},
    {"entropy_coef": 0.3},
    {"delta": 1.02},
    {"use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 10.0},
)
ALL_TOGETHER: dict[str, Any] = {key: value for other in OTHERS for key, value in other.items()}


@dataclass(frozen=True)
class Case:
    """Settings beside those of every case."""

    settings: dict[str, Any]
    is_off_policy: bool
    """Whether the policy has moved since its log-probabilities were taken."""

    def __str__(self) -> str:
        return " ".join([*(f"{key}={value}" for key, value in self.settings.items()), "off" * self.is_off_policy])


def _build_cases() -> list[Case]:
    cases = []
    combinations = itertools.product(IMPORTANCE_LEVELS, (None, *CORRECTION_MODES), LOSS_TYPES)
    for number, (level, mode, loss_type) in enumerate(combinations):
        if loss_type == "vespo" and (level == "sequence" or (mode or "token").startswith("sequence")):
            continue  # refused (tests/grpo/test_config.py)
        correction = {"vllm_importance_sampling_correction": mode is not None}
        correction |= {} if mode is None else {"vllm_importance_sampling_mode": mode}
        base = {"loss_type": loss_type, "importance_sampling_level": level, **correction}
        alone = OTHERS[(number + number // len(OTHERS)) % len(OTHERS)]
        cases += [Case({**base, **alone}, is_off_policy=number % 3 == 0), Case({**base, **ALL_TOGETHER}, True)]
    return cases


def build_case_settings(case: Case) -> dict[str, Any]:
    """All settings of a case, with bounds within which some ratios lie and others do not."""
    defaults = {name: value for other in OTHERS for name, value in other.items()}
    off = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "beta": 0.0,
        "use_bias_correction_kl": False,
        "entropy_coef": 0.0,
        "delta": None,
        "use_adaptive_entropy": False,
        "entropy_target": 0.2,
    }
    assert off.keys() == defaults.keys()
    return {
        **off,
        "importance_sampling_level": "token",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.2 if case.settings["loss_type"] == "vespo" else 0.7,
        "vllm_importance_sampling_clip_max": 5.0 if case.settings["loss_type"] == "vespo" else 1.4,
        "epsilon": 0.01,
        "epsilon_high": 1.01 if case.settings["loss_type"] == "cispo" else 0.01,
        "num_iterations": 2 if case.is_off_policy else 1,
        **case.settings,
    }


CASES = _build_cases()
