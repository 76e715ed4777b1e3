"""Reward gained per GPU-hour, by hand."""

from typing import Any

import report


def build_results(command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"runs": {"machine": "NVIDIA H200", "command": command, "rows": rows}}


def build_row(**changes: Any) -> dict[str, Any]:
    rewards = (0.1, 0.3, 0.5, 0.6, 0.6, 0.6, 0.7, 0.9)
    return {"seed": 1, "processes": 2, "step_s": 90.0, "log": [{"reward": reward} for reward in rewards], **changes}


def test_gain_is_of_quarters_and_hours_are_of_all_gpus() -> None:
    # 0.8 - 0.2 in 8 steps of 90 s on two cards: 0.4 GPU-hours
    table = report.tabulate_learning(build_results("run.sh learn", [build_row()]))
    assert table.splitlines()[-1] == "| runs | 2 GPUs | 1 | 0.6 | 24 | 1.5 | 1.5 to 1.5 |"


def test_runs_that_share_a_card_share_its_hours_and_failed_ones_are_left_out() -> None:
    rows = [build_row(processes=1, arm="lora", seed=seed, step_s=450.0 * seed) for seed in (1, 2)]
    rows.append(build_row(processes=1, arm="lora", error="RuntimeError"))
    table = report.tabulate_learning(build_results("run.sh learn --per_gpu 5", rows))
    assert table.splitlines()[-1] == "| runs | lora | 2 | 0.6 | 18 | 2.25 | 1.5 to 3 |"


def test_runs_on_a_cpu_have_no_gpu_hours() -> None:
    results = build_results("run.sh learn", [build_row()])
    results["runs"]["machine"] = "x86_64 CPU, 2 threads"
    assert len(report.tabulate_learning(results).splitlines()) == 2
