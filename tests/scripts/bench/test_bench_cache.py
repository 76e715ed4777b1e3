"""Admission by room in the simulated engine."""

from bench_cache import AdmittedRun
from bench_overlap import Run, Setting


def test_admission_by_room_prefills_less_and_samples_as_much() -> None:
    shared = {"steps": 3, "seed": 0, "num_ranks": 1, "max_policy_lag": 0, "groups_per_rank": 4}
    single, crowded = (
        Setting(name="", agents_per_slot=times, kv_tokens=200_000, slots=8, **shared) for times in (1, 4)
    )
    alone, plain, admitted = Run(single).run(), Run(crowded).run(), AdmittedRun(crowded).run()
    assert admitted["prefilled_per_sampled"] < plain["prefilled_per_sampled"] / 3
    assert admitted["trained_tokens_per_s"] > max(alone["trained_tokens_per_s"], plain["trained_tokens_per_s"])


def test_where_all_histories_fit_nothing_changes() -> None:
    setting = Setting(
        name="", agents_per_slot=2, kv_tokens=10**9, slots=4, steps=2, seed=0, num_ranks=1, max_policy_lag=1,
        groups_per_rank=1,
    )  # fmt: skip
    plain, admitted = Run(setting).run(), AdmittedRun(setting).run()
    assert admitted["seconds_per_step"] == plain["seconds_per_step"]
    assert admitted["prefilled_per_sampled"] == plain["prefilled_per_sampled"]
