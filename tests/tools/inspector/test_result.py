"""The page of a run as JSON: its header, tasks by step, pass rates, how sessions ended; and two runs at once."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from recorded import build_call, describe_rollout, name_record, write_rows, write_session
from starlette.testclient import TestClient

from polar_trl.eval.sample_tasks import SampleResult
from polar_trl.grpo.logs.lessons import Batch, Lessons
from polar_trl.rollout.reasons import MAX_COMPLETION
from polar_trl.tools.inspector.app import build_app
from polar_trl.tools.inspector.curves import Curves
from polar_trl.tools.inspector.figures import build_figures
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.tools.inspector.task_map import MAX_COLUMNS, MAX_TASKS, build_task_maps
from polar_trl.types import AgentExit, GradeReport

DIFF = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-old\n+new <b>\x1b[31m\n# cut: 3 more files\n"


def session(folder: Path, name: str, step: int | None, *, mode: str = "train", batch: str = "", **rollout: Any) -> str:
    """Record a session that the trainer was given for a step; None: not given yet. Returns its key."""
    batch = batch or f"{mode}_{(step or 1) - 1:05d}"
    write_session(folder, name, [build_call(name, 0, (1,), (2,))], batch=batch, **rollout)
    record = name_record(name, batch)
    if step is not None:
        reward = rollout.get("reward", 1.0)
        write_rows(folder, step, [describe_rollout(name, 0.5) | {"record": record, "reward": reward}], mode=mode)
    return record.removeprefix("sessions/").removesuffix(".jsonl")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    for step, reward in ((1, 0.0), (2, 1.0)):
        for number in range(2):
            session(folder, f"t-{step}-{number}", step, task_id="easy", reward=reward if number else 1.0)
        session(folder, f"h-{step}", step, task_id="hard", reward=0.0)
    session(folder, "e-2", 2, mode="eval", batch="eval_00002", task_id="held out", reward=0.25)
    session(folder, "open", None, batch="train_00002", task_id="easy", reward=1.0)
    return folder


def open_client(*folders: Path) -> TestClient:
    runs = [RunFolder(folder, prefix=f"{number}~" if number else "") for number, folder in enumerate(folders)]
    return TestClient(build_app(*runs), base_url="http://localhost")


def test_tasks_by_step(run: Path) -> None:
    with open_client(run) as client:
        maps = client.get("/api/tasks").json()
        cell = client.get("/api/sessions", params={"task": "easy", "step": "1-1", "use": "to train"}).json()
    train = maps["train"]
    assert train["columns"] == [[1, 1], [2, 2]] and (train["low"], train["high"]) == (0.0, 1.0)
    assert [(task["task"], task["mean"], task["sessions"]) for task in train["tasks"]] == [
        ("easy", 0.75, 4),
        ("hard", 0.0, 2),
    ]
    assert train["tasks"][0]["cells"] == [
        {"column": 0, "mean": 0.5, "sessions": 2},
        {"column": 1, "mean": 1.0, "sessions": 2},
    ]
    assert [task["task"] for task in maps["eval"]["tasks"]] == ["held out"]
    assert cell["matched"] == 2 and maps["tasks"] == maps["pass_at"] == []


def test_the_header_says_which_steps_taught_nothing(run: Path) -> None:
    with open_client(run) as client:
        assert client.get("/api/run").json()["lessons"]["steps_that_taught_nothing"] == 0
        Lessons(run, "a").note(
            Batch(step=1, mode="train", rewards=[0, 0], has_advantage=False, group_size=2, cuts=[MAX_COMPLETION] * 2)
        )
        told = client.get("/api/run").json()["lessons"]
    assert (told["steps_that_taught_nothing"], told["try"]) == (1, "set max_completion_length higher")
    assert (
        told["taught_nothing"] == "all 2 rewards are 0; answers of 2 of 2 sessions were cut at max_completion_length"
    )


def test_many_steps_share_columns_and_many_tasks_are_counted() -> None:
    rows = [
        {"use": "trained", "step": step, "task": f"t{step}", "reward": 1.0} for step in range(1, 10 * MAX_COLUMNS + 2)
    ]
    found = build_task_maps([*rows, {"use": "trained", "step": 1, "task": "none", "reward": None}])["train"]
    assert len(found["columns"]) <= MAX_COLUMNS and found["columns"][0] == [1, 11]
    assert found["columns"][-1][1] == 10 * MAX_COLUMNS + 1
    assert (len(found["tasks"]), found["num_tasks"]) == (MAX_TASKS, len(rows))


def evaluate(step: int, prefix: str, solved: int) -> dict[str, Any]:
    """A line of the log, of 48 sessions."""
    values = {"runtime": 1.0, "reward": 0.5, "graded": 48, "solved": solved, "pass_rate": solved / 48}
    return {"step": step, **{f"{prefix}{name}": value for name, value in values.items()}}


def test_evaluations_are_a_chart_with_their_interval_or_a_line_for_each_set(tmp_path: Path) -> None:
    def build(*lines: dict[str, Any]) -> list[dict[str, Any]]:
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [chart for chart in Curves(tmp_path).build()["charts"] if chart["title"] == "Evaluations"]

    bounds = {"eval_pass_rate_low": 0.25, "eval_pass_rate_high": 0.75}
    assert build(evaluate(0, "eval_", 12)) == []
    (chart,) = build(*(evaluate(step, "eval_", solved) | bounds for step, solved in ((0, 12), (8, 24))))
    assert (chart["steps"], chart["unit"]) == ([0, 8], "pass@1")
    assert [(line["name"], line["values"]) for line in chart["series"]] == [
        ("pass@1", [0.25, 0.5]), ("95 % from", [0.25, 0.25]), ("to", [0.75, 0.75]),
    ]  # fmt: skip
    (chart,) = build(evaluate(0, "eval_easy_", 12), evaluate(8, "eval_easy_", 48), evaluate(8, "eval_hard_", 0))
    assert [(line["name"], line["values"]) for line in chart["series"]] == [
        ("easy", [0.25, 1.0]),
        ("hard", [None, 0.0]),
    ]
    (chart,) = build(evaluate(0, "eval_", 12), evaluate(8, "eval_", 48), evaluate(8, "eval_by_hand_", 0))
    assert [line["name"] for line in chart["series"]] == ["pass@1", "by_hand"]


def test_the_header_says_where_the_reward_began_and_ended() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "reward": step / 10} for step in range(1, 9)]
    lines[3]["reward"] = 2.0
    lines += [evaluate(step, "eval_", solved) for step, solved in ((0, 4), (4, 10), (8, 24))]
    lines += [evaluate(8, "eval_hard_", 2)]
    rows = [{"ended": ended} for ended in ("completed", "completed", "grader failed", None)]
    figures = build_figures(lines, rows)
    assert figures["reward"] == {
        "first": pytest.approx(0.15),
        "last": pytest.approx(0.75),
        "best": 2.0,
        "best_step": 4,
    }
    whole, hard = figures["evaluations"]
    assert [(line["step"], line["solved"]) for line in whole] == [(0, 4), (8, 24)]
    assert [(line["set"], line["solved"]) for line in hard] == [("hard", 2)]
    assert figures["failure"] == ["grader failed", 1]
    assert build_figures([{"step": 1, "reward": None}], []) == {"reward": None, "evaluations": [], "failure": None}


def test_an_evaluation_has_pass_rates(tmp_path: Path) -> None:
    outcomes = {"a": [1.0, 0.0, 0.0, 1.0], "b": [1.0, None, 1.0], "c": [None]}
    lines = []
    for task, rewards in outcomes.items():
        for sample, reward in enumerate(rewards):
            write_session(tmp_path, f"{task}-{sample}", [], task_id=task, reward=reward)
            result = SampleResult(
                task=task, sample=sample, attempt=1, rollout="r", record="s", repo=None, reward=reward, error=None,
                stop_reason="completed", calls=1, sampled_tokens=1, seconds={},
            )  # fmt: skip
            lines.append(json.dumps(asdict(result)) + "\n")
    (tmp_path / "results.jsonl").write_text("".join(lines) + '{"torn')
    with open_client(tmp_path) as client:
        found = client.get("/api/tasks").json()
        assert client.get("/api/run").json()["is_evaluation"]
    assert [(rate["k"], rate["rate"], rate["num_left_out"]) for rate in found["pass_at"]] == [
        (1, 0.75, 1),
        (2, pytest.approx((1 - 1 / 6 + 1) / 2), 1),
        (4, 1.0, 2),
    ]
    assert [(task["task"], task["passed"], task["graded"], task["failed"]) for task in found["tasks"]] == [
        ("b", 2, 2, 1),
        ("a", 2, 4, 0),
        ("c", 0, 0, 1),
    ]
    low, high = found["tasks"][1]["interval"]
    assert low < 0.5 < high and found["tasks"][2]["interval"] is None
    (tmp_path / "results.jsonl").write_text("[]\n")
    with open_client(tmp_path) as client:
        reply = client.get("/api/tasks")
        assert reply.status_code == 500 and "results.jsonl, line 1" in reply.json()["error"]


def test_how_a_session_ended(run: Path) -> None:
    report = GradeReport(
        output_tail="E assert 1 == 2 \u202e", failed_tests=("test_x[<i>]",), missing_tests=("test_y",), num_tests=3,
        num_passed=1, num_failed=1, num_missing=1,
    )  # fmt: skip
    exits = AgentExit(exit_code=127, output_tail="starting\nsh: my-agent: not found\n")
    fields: dict[str, Any] = {"stop_reason": "agent_failed", "agent_exit": exits, "grading": report, "changes": DIFF}
    key = session(run, "bad", 1, reward=0.0, **fields)
    killed = AgentExit(exit_code=None, signal="SIGKILL", output_tail="x" * 90_000)
    session(run, "cut", 1, reward=None, stop_reason="agent_timeout", error="it <b> broke", error_kind="grader_failed",
            agent_exit=killed)  # fmt: skip
    with open_client(run) as client:
        choices = client.get("/api/run").json()["choices"]
        (row,) = client.get("/api/sessions", params={"ended": "agent exit code 127"}).json()["rows"]
        told = client.get("/api/ending", params={"key": key}).json()
        other = client.get("/api/sessions?ended=completed").json()["rows"][0]["key"]
        nothing = client.get("/api/ending", params={"key": other}).json()
    assert choices["ended"] == {"completed": 8, "agent exit code 127": 1, "the grader failed": 1}
    assert choices["examples"] == {
        "agent exit code 127": "sh: my-agent: not found",
        "the grader failed": "it <b> broke",
    }
    assert (row["key"], row["error"]) == (key, "sh: my-agent: not found")
    assert told["agent"] == {"ended": "exit code 127", "output": exits.output_tail}
    assert told["grading"]["output"] == "E assert 1 == 2 ⟨U+202E⟩" and told["grading"]["failed"] == ["test_x[<i>]"]
    assert (told["grading"]["missing"], told["grading"]["num_passed"]) == (["test_y"], 1)
    assert told["changes"] == DIFF.replace("\x1b", "␛")
    assert nothing == {"agent": None, "grading": None, "changes": None}


@pytest.fixture
def both(run: Path, tmp_path: Path) -> Iterator[TestClient]:
    session(tmp_path / "second", "t-9", 9, task_id="easy", reward=1.0)
    with open_client(run, tmp_path / "second") as client:
        yield client


def test_two_runs_are_told_apart_by_their_keys(both: TestClient) -> None:
    assert both.get("/api/run").json()["runs"] == ["first", "second"]
    assert both.get("/api/run?run=1").json()["num_sessions"] == 1
    (row,) = both.get("/api/sessions?run=1").json()["rows"]
    assert row["key"].startswith("1~") and row["rollout"] == "t-9"
    told = both.get("/api/session", params={"key": row["key"]}).json()
    assert told["row"]["key"] == row["key"] and [item["key"] for item in told["group"]] == [row["key"]]
    assert both.get("/api/calls", params={"key": row["key"], "first": 0}).json()[0]["reply"]["text"]["text"] == "ok"
    assert both.get("/api/session", params={"key": row["key"].removeprefix("1~")}).status_code == 404
    assert both.get("/api/task_names?run=1").json() == ["easy"]
    assert both.get("/api/task_names").json() == ["easy", "hard", "held out"]


def test_the_newest_start_is_among_the_settings(run: Path) -> None:
    starts = [{"git_commit": "old"}, {"git_commit": "abc", "versions": {"trl": "1.16.0"}}]
    (run / "settings.json").write_text(json.dumps({"agent": "pi", "agent_version": "1.6.0", "starts": starts}))
    with open_client(run) as client:
        settings = client.get("/api/run").json()["settings"]
    assert settings == {
        "agent": "pi", "agent_version": "1.6.0", "starts": 2, "git_commit": "abc", "versions: trl": '"1.16.0"',
    }  # fmt: skip
