"""The numbers of an evaluation, from lines of results."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from polar_trl.cli.eval import print_summary
from polar_trl.eval.sample_tasks import SampleResult, read_results
from polar_trl.eval.summary import build_summary
from polar_trl.types import ErrorKind


def build_result(task: str, sample: int, reward: float | None, **fields: Any) -> SampleResult:
    values = {
        "attempt": 1, "rollout": f"{task}-{sample}", "record": "r", "repo": None, "error": None, "calls": 2,
        "stop_reason": "completed", "sampled_tokens": 10, "seconds": {"agent": 3.0},
    }  # fmt: skip
    return SampleResult(task=task, sample=sample, reward=reward, **(values | fields))


def test_the_numbers_of_a_summary_by_hand() -> None:
    failed = {"error": "SandboxError: no disk", "stop_reason": "prepare_failed", "calls": 0, "sampled_tokens": 0}
    results = [
        build_result("a", 0, 1.0), build_result("a", 1, 0.0, stop_reason="agent_timeout", calls=4),
        build_result("b", 0, 0.5), build_result("b", 1, None, **failed), build_result("b", 1, 1.5, attempt=2),
        build_result("c", 0, None, **failed), build_result("a", 2, 1.0), build_result("gone", 0, 1.0),
    ]  # fmt: skip
    groups = {"a": "x/y", "b": "x/y", "c": "z"}
    summary = build_summary(["a", "b", "c", "d"], results, num_samples=2, ks=[1, 2], groups=groups)
    assert summary["sessions"] == {"wanted": 8, "graded": 4, "passed": 2, "failed": 1, "missing": 3}
    assert summary["failures"] == {"prepare_failed": {"sessions": 2, "latest": "SandboxError: no disk"}}
    assert (summary["tasks"], summary["tasks_graded"], summary["mean_reward"]) == (4, 2, 0.75)
    one, two = summary["pass_at"]["1"], summary["pass_at"]["2"]
    assert (one["rate"], one["num_tasks"], one["num_left_out"]) == (0.5, 2, 2)  # a reward of 0.5 is no pass
    assert (two["rate"], two["num_tasks"], two["num_left_out"]) == (1.0, 2, 2)
    assert (summary["calls_per_session"], summary["sampled_tokens_per_session"]) == (2.5, 10.0)
    assert summary["stop_reasons"] == {"completed": 3, "agent_timeout": 1}
    assert list(summary["by"]) == ["x/y", "z"]
    assert summary["by"]["z"]["pass_at"]["1"]["rate"] is None and summary["by"]["z"]["sessions"]["failed"] == 1
    assert summary["by"]["x/y"]["sessions"]["graded"] == 4


def test_why_graded_sessions_did_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"reason": "agent exit code 127", "stop_reason": "agent_failed"}
    results = [
        build_result("a", 0, 0.0, **lost, detail="old"),
        build_result("a", 1, 0.0, **lost, detail="my-agent: [red]not found", record="sessions/s/a.jsonl"),
        build_result("b", 0, 0.0, reason="tests failed", detail="1 of 2 tests failed: t::x"),
        build_result("b", 1, 1.0, **lost),  # it failed, and its work is good all the same
        build_result("c", 0, None, reason="the grader failed", error="x", error_kind="grader_failed"),
    ]
    lines = [asdict(result) for result in results]
    for name in ("reason", "detail"):
        del lines[3][name]  # as earlier versions wrote it
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = build_summary(["a", "b", "c"], read_results(tmp_path), num_samples=2, ks=[1])
    assert summary["reasons"] == [
        {
            "reason": "agent exit code 127",
            "sessions": 2,
            "example": "my-agent: [red]not found",
            "record": "sessions/s/a.jsonl",
        },
        {"reason": "tests failed", "sessions": 1, "example": "1 of 2 tests failed: t::x", "record": "r"},
    ]
    about = {"model": "m", "agent": "a", "task_set": "t", "output_dir": "out", "grouped_by": "repo"}
    print_summary({**about, **summary})
    said = capsys.readouterr().out
    assert "why graded sessions did not pass" in said and "agent exit code 127" in said
    assert "my-agent: [red]not found" in " ".join(said.split())


@pytest.mark.parametrize(
    ("stop_reason", "kind", "name"),
    [
        ("agent_failed", "model_calls_failed", "model_calls_failed"),
        ("completed", "grader_failed", "grader_failed"),
        # lines of earlier versions, which have no kind
        ("prepare_failed", None, "prepare_failed"),
        ("no_calls", None, "no_calls"),
        ("agent_failed", None, "unknown"),
    ],
)
def test_failures_are_counted_by_kind_whatever_their_words(
    tmp_path: Path, stop_reason: str, kind: ErrorKind | None, name: str
) -> None:
    line = asdict(build_result("a", 0, None, error="the grader failed", stop_reason=stop_reason, error_kind=kind))
    if kind is None:
        del line["error_kind"]
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    summary = build_summary(["a"], read_results(tmp_path), num_samples=1, ks=[1])
    assert summary["failures"] == {name: {"sessions": 1, "latest": "the grader failed"}}
