"""Test the summary of a finished run."""

from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.summary import build_summary, write_summary


def test_a_summary_of_a_log(tmp_path: Path) -> None:
    log: list[dict[str, Any]] = [
        {"reward": r, "polar/sampled_tokens": 10, "polar/trained_tokens": 9, "polar/trajectories_per_rollout": 1.5}
        for r in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0)
    ]
    # a step in which nothing had a reward still cost its tokens
    log.insert(3, {"reward": None, "polar/sampled_tokens": 10, "polar/trained_tokens": 0})
    gap = "sampling/sampling_logp_difference"
    log[0] |= {f"{gap}/mean": 0.02, f"{gap}/p99": 0.1, f"{gap}/max": 0.7}
    log[1] |= {f"{gap}/mean": 0.04, f"{gap}/p99": 0.3, f"{gap}/max": 0.5}
    log.append({"train_runtime": 3.0})
    summary = build_summary(log, seconds=12.34)
    assert (summary["steps"], summary["seconds"]) == (9, 12.3)
    assert summary["reward_first_quarter"] == pytest.approx(0.1)
    assert summary["reward_last_quarter"] == pytest.approx(1.0)
    assert (summary["sampled_tokens"], summary["trained_tokens"]) == (90, 72)
    assert summary["trajectories_per_rollout"] == 1.5
    gaps = [summary[f"logprob_gap_{name}"] for name in ("mean", "p99", "max")]
    assert gaps == pytest.approx([0.03, 0.2, 0.7])
    assert summary["overhead_share"] is None  # no step had it
    write_summary(tmp_path, summary)
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="logged no reward"):
        build_summary([{"train_runtime": 3.0}], seconds=1.0)
