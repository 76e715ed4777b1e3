"""Admission by room in the simulated engine."""

import json
from pathlib import Path

import bench_cache
import pytest
from bench_overlap import Run, Setting

from polar_trl.engine import cache_room


def test_admission_by_room_prefills_less_and_samples_as_much() -> None:
    shared = {"steps": 3, "seed": 0, "num_ranks": 1, "max_policy_lag": 0, "groups_per_rank": 4}
    single, crowded = (
        Setting(name="", agents_per_slot=times, kv_tokens=200_000, slots=8, **shared) for times in (1, 4)
    )
    alone, plain, admitted = Run(single).run(), Run(crowded).run(), Run(crowded, capacity=200_000).run()
    assert admitted["prefilled_per_sampled"] < plain["prefilled_per_sampled"] / 3
    assert admitted["trained_tokens_per_s"] > max(alone["trained_tokens_per_s"], plain["trained_tokens_per_s"])


def test_where_all_histories_fit_nothing_changes() -> None:
    setting = Setting(
        name="", agents_per_slot=2, kv_tokens=10**9, slots=4, steps=2, seed=0, num_ranks=1, max_policy_lag=1,
        groups_per_rank=1,
    )  # fmt: skip
    plain, admitted = Run(setting).run(), Run(setting, capacity=setting.kv_tokens).run()
    assert admitted["seconds_per_step"] == plain["seconds_per_step"]
    assert admitted["prefilled_per_sampled"] == plain["prefilled_per_sampled"]


def test_reserving_more_prefills_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim beside `RESERVED`."""
    monkeypatch.setattr(cache_room, "RESERVED", cache_room.RESERVED)  # the script changes it
    out = tmp_path / "cache.json"
    bench_cache.main(["--steps", "2", "--reserved", "0", "0.9", "--json", str(out)])
    rows = {(row["name"], row["admission"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 21
    assert "| by room, 0.9 reserved |" in capsys.readouterr().out
    none, most = (rows["4x, lag 1", f"by room, {share} reserved"]["prefilled_per_sampled"] for share in ("0", "0.9"))
    assert none > 2 * most
