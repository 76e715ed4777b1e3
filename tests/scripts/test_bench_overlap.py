"""The simulation obeys the rules that it stands for, and real ranks run the same settings."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_overlap import Run, build_settings, build_small_settings, find_gap, run_real

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_overlap.py"


def test_it_writes_how_busy_engines_are(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    command = [sys.executable, str(SCRIPT), "--ranks", "2", "--steps", "2", "--json", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    document = json.loads(out.read_text())
    assert len(document["results"]) == 11
    assert 0.0 < document["busy_lag0"] < document["busy_lag1"] <= document["busy_lag2"] <= 1.0
    for result in document["results"]:
        assert result["slots_in_rollout"] <= result["sampling_in_rollout"]
        assert f"| {result['name']} |" in shown
    assert "real_vs_sim" not in document


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_token_is_trained_later_than_its_lag_allows_and_all_sessions_begin(lag: int) -> None:
    (setting,) = [s for s in build_settings(4, 3, 0, 2_500_000) if s.name == f"1x, lag {lag}"]
    run = Run(replace(setting, groups_per_rank=1.25, group_size=8))  # five groups on four ranks
    result = run.run()
    assert max(map(int, result["policy_lag"])) <= lag
    assert sum(result["policy_lag"].values()) == pytest.approx(1.0)
    assert run.num_started == 40 * (3 + setting.num_open)


def test_a_rank_takes_sessions_that_wait_on_another() -> None:
    (setting,) = [s for s in build_settings(4, 3, 0, 2_500_000) if s.name == "1x, lag 1"]
    assert Run(setting).run()["moved"] > 0.0
    assert Run(replace(setting, num_ranks=1)).run()["moved"] == 0.0


def test_the_gap_is_the_largest_relative_difference() -> None:
    pairs = [
        {
            "simulated": {"seconds_per_step": 100.0, "slots_in_rollout": 0.5},
            "real": {"seconds_per_step": 101.0, "slots_in_rollout": 0.48},
        }
    ]
    assert find_gap(pairs) == pytest.approx(0.04)


def test_two_real_ranks_run_a_setting() -> None:
    """At a scale at which their times say little; that they keep the bound does not depend on it."""
    (setting,) = [s for s in build_small_settings(2, 0) if s.name == "2 ranks, 2x, lag 1"]
    result = run_real(replace(setting, steps=3), 0.005)
    assert 0.0 < result["slots_in_rollout"] <= 1.0
    assert set(result["policy_lag"]) <= {"0", "1"}
