"""Tasks x samples into a folder: the real runner, proxy and sandboxes, with a scripted engine and odd graders."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from polar_trl.cli import main
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError, EngineError, LawError, PolarError, RecordError
from polar_trl.eval.sample_tasks import (
    SampleResult,
    find_repo,
    list_samples,
    open_folder,
    read_results,
    sample_tasks,
    share_folder,
)
from polar_trl.eval.summary import build_summary
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.recording.log import read_record
from polar_trl.rollout.runner import RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, Task

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
CALL = (
    'python3 -I -S -c \'import http.client, os; c = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"]'
    '.split("/")[2]); c.request("POST", "/v1/chat/completions", "{\\"messages\\": [{\\"role\\": \\"user\\", '
    '\\"content\\": \\"hi\\"}]}", {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}); '
    "print(c.getresponse().status)'"
)
SETTINGS = {"model": "m 1", "temperature": 0.7}


def build_tasks(count: int) -> list[Task]:
    return [Task(id=f"task/{number}", instruction="x", metadata={"repo": "a/b"}) for number in range(count)]


@contextmanager
def runner(
    tmp_path: Path,
    grade: Callable[..., Any] = lambda task, box: 1.0,
    *,
    reply: Callable[..., Any] = lambda prompt: REPLY,
    **config: Any,
) -> Iterator[RolloutRunner]:
    with Proxy(ScriptedEngine(reply), RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
        rollouts = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(tmp_path / "boxes"),
            harness=ShellHarness(CALL),
            grader=FunctionGrader(grade),
            config=RolloutConfig(**config),
        )
        try:
            yield rollouts
        finally:
            rollouts.close()
    assert list((tmp_path / "boxes").glob("*")) == [], "a sandbox was left behind"


def evaluate(
    rollouts: RolloutRunner, out: Path, tasks: list[Task], *, num_samples: int = 1, max_attempts: int = 3
) -> list[SampleResult]:
    """Sample as a start of `polar-trl eval` does."""
    with open_folder(out, SETTINGS) as before:
        samples = list_samples(tasks, before, num_samples=num_samples, max_attempts=max_attempts)
        sample_tasks(rollouts, samples, out, max_attempts=max_attempts)
    return read_results(out)


def test_every_session_has_a_line_and_a_record(tmp_path: Path) -> None:
    with runner(tmp_path, lambda task, box: float(task.id == "task/1")) as rollouts:
        results = evaluate(rollouts, tmp_path / "out", build_tasks(2), num_samples=2)
    keys = [(result.task, result.sample) for result in results]
    assert sorted(keys) == [("task/0", 0), ("task/0", 1), ("task/1", 0), ("task/1", 1)]
    for result in results:
        record = read_record(tmp_path / "out" / result.record)
        assert record.finished and record.rollout.id == result.rollout and record.rollout.task_id == result.task
        assert record.rollout.reward == result.reward == float(result.task == "task/1")
        counts = (result.attempt, result.calls, result.sampled_tokens, result.repo, result.error)
        assert counts == (1, 1, len(REPLY), "a/b", None)
        assert set(result.seconds) == {"queue", "prepare", "agent", "held", "grade"}
    assert json.loads((tmp_path / "out" / "settings.json").read_text()) == SETTINGS
    assert main(["replay", str(tmp_path / "out")]) == 0


def test_it_goes_on_with_what_is_left_and_with_more_samples(tmp_path: Path) -> None:
    out, tasks = tmp_path / "out", build_tasks(3)
    with runner(tmp_path) as rollouts:
        evaluate(rollouts, out, tasks)
        lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
        # as a kill leaves it: two sessions ended, the line of the third was torn
        (out / "results.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:-9])
        assert len(read_results(out)) == 2
        results = evaluate(rollouts, out, tasks, num_samples=2)
    assert [json.loads(line) for line in lines[:2]] == [vars_of(result) for result in results[:2]]
    assert Counter((result.task, result.sample) for result in results) == {
        (task.id, sample): 1 for task in tasks for sample in range(2)
    }
    assert len({result.record for result in results}) == 6
    # and once all is done, nothing is run
    with runner(tmp_path, reply=lambda prompt: pytest.fail("a session was run again")) as rollouts:
        assert evaluate(rollouts, out, tasks, num_samples=2) == results


def vars_of(result: SampleResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in SampleResult.__dataclass_fields__}


def test_failures_of_the_infrastructure_are_tried_again_and_counted_apart(tmp_path: Path) -> None:
    """A grader that fails on the first attempt of one task, and always on another."""
    seen = Counter[str]()

    def grade(task: Task, box: Any) -> float:
        seen[task.id] += 1
        if task.id == "task/2" or (task.id == "task/1" and seen[task.id] == 1):
            raise RuntimeError("the judge is ill")
        return 1.0

    out, tasks = tmp_path / "out", build_tasks(3)
    with runner(tmp_path, grade) as rollouts:
        results = evaluate(rollouts, out, tasks, max_attempts=2)
    assert {(result.reward, result.error_kind) for result in results} == {(1.0, None), (None, "grader_failed")}
    attempts = {(result.task, result.attempt): result.reward for result in results}
    assert attempts == {
        ("task/0", 1): 1.0, ("task/1", 1): None, ("task/1", 2): 1.0, ("task/2", 1): None, ("task/2", 2): None,
    }  # fmt: skip
    assert len({result.record for result in results}) == 5
    assert all((out / result.record).exists() for result in results)

    summary = build_summary([task.id for task in tasks], results, num_samples=1, ks=[1])
    assert summary["sessions"] == {"wanted": 3, "graded": 2, "passed": 2, "failed": 1, "missing": 0}
    assert summary["failures"].keys() == {"grader_failed"} and summary["failures"]["grader_failed"]["sessions"] == 3
    assert "the grader failed: RuntimeError: the judge is ill (" in summary["failures"]["grader_failed"]["latest"]
    assert ' in grade, `raise RuntimeError("the judge is ill")`)' in summary["failures"]["grader_failed"]["latest"]
    # the task that could not be graded is in no rate: two of two, and not two of three
    assert (summary["tasks"], summary["tasks_graded"]) == (3, 2)
    rate = summary["pass_at"]["1"]
    assert (rate["rate"], rate["num_tasks"], rate["num_left_out"], summary["mean_reward"]) == (1.0, 2, 1, 1.0)

    # given up at two attempts, and taken up again at three
    assert list_samples(tasks, results, num_samples=1, max_attempts=2) == []
    (left,) = list_samples(tasks, results, num_samples=1, max_attempts=3)
    assert (left.task.id, left.attempt) == ("task/2", 3)


def test_no_session_waits_for_another_and_threads_are_few(tmp_path: Path) -> None:
    """The first task is graded once all others are on disk: a batch that waits for its slowest would never end."""
    out, tasks = tmp_path / "out", build_tasks(12)
    most_open = 0

    def grade(task: Task, box: Any) -> float:
        nonlocal most_open
        names = [thread.name for thread in threading.enumerate()]
        most_open = max(most_open, sum(name.startswith("polar-session-") for name in names))
        tick = threading.Event()
        while task.id == "task/0" and len(read_results(out)) < len(tasks) - 1:
            tick.wait(0.02)
        return 1.0

    with runner(tmp_path, grade, max_agents=1, max_preparing=1, max_grading=2) as rollouts:
        results = evaluate(rollouts, out, tasks)
    assert [result.task for result in results][-1] == "task/0" and len(results) == 12
    assert 2 <= most_open <= 2 * 1 + 1 + 2


def test_an_engine_that_is_dead_stops_the_evaluation(tmp_path: Path) -> None:
    def reply(prompt: Any) -> Any:
        raise EngineError("out of memory")

    out, tasks = tmp_path / "out", build_tasks(20)
    with runner(tmp_path, reply=reply, max_agents=1, max_preparing=1, max_grading=1) as rollouts:
        with pytest.raises(PolarError, match=r"last 8 sessions .*: model calls failed .*: out of memory"):
            evaluate(rollouts, out, tasks)
        results = read_results(out)
        assert len(results) == 8 and {result.reward for result in results} == {None}
        # what was in flight has spent no attempt, and the machine works again
        rollouts.proxy._backend.engine._choose = lambda prompt: REPLY  # type: ignore[attr-defined]
        results = evaluate(rollouts, out, tasks)
    summary = build_summary([task.id for task in tasks], results, num_samples=1, ks=[1])
    assert (summary["sessions"]["graded"], summary["failures"]["model_calls_failed"]["sessions"]) == (20, 8)


def test_a_broken_law_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polar_trl.rollout import session_run

    def broken(*_: Any) -> None:
        raise LawError("r0: broken for this test")

    monkeypatch.setattr(session_run, "check_laws", broken)
    with runner(tmp_path) as rollouts, pytest.raises(LawError, match="broken for this test"):
        evaluate(rollouts, tmp_path / "out", build_tasks(3))
    assert read_results(tmp_path / "out") == []


def test_another_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_folder(out, {**SETTINGS, "temperature": 0.3}) as before:
        assert before == []
    with open_folder(out, SETTINGS):  # what failed before any session ended decides nothing
        pass
    assert json.loads((out / "settings.json").read_text()) == SETTINGS
    result = SampleResult(
        task="t", sample=0, attempt=1, rollout="r", record="sessions/r.jsonl", repo=None, reward=1.0, error=None,
        stop_reason="completed", calls=1, sampled_tokens=2, seconds={},
    )  # fmt: skip
    (out / "results.jsonl").write_text(json.dumps(asdict(result)) + "\n")
    with (
        pytest.raises(ConfigError, match=r"another setting: temperature is 0\.2 and was 0\.7; set it back"),
        open_folder(out, {**SETTINGS, "temperature": 0.2}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"made with \(top_k is missing\); name another output_dir"),
        open_folder(out, {**SETTINGS, "top_k": 3}),
    ):
        pass
    with pytest.raises(ConfigError, match=r"temperature is None and was 0\.7"), open_folder(out, {"model": "m 1"}):
        pass


def test_a_folder_is_another_command_s_until_the_last_engine_has_left_it(tmp_path: Path) -> None:
    command, engine = open_folder(tmp_path, SETTINGS), share_folder(tmp_path)
    command.__enter__()
    engine.__enter__()
    for process in (command, engine):
        with pytest.raises(ConfigError, match="written by this very process"), open_folder(tmp_path, SETTINGS):
            pass
        process.__exit__(None, None, None)
    with open_folder(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize(
    "names",
    [["results.jsonl"], ["notes.txt"], ["merged"], ["config.json"], ["trained.jsonl", "settings.json", "sessions"]],
)
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with (
        pytest.raises(ConfigError, match=f"holds {names[0]}: it is the folder of something else"),
        open_folder(tmp_path, SETTINGS),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"editor": 1}', "is of something else"), ("[]", "is of something else"), ("{", "is no JSON")],
)
def test_settings_of_something_else_are_left_alone(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=message), open_folder(tmp_path, SETTINGS):
        pass
    assert (tmp_path / "settings.json").read_text() == text
    with (
        pytest.raises(ConfigError, match=r"settings\.json is a file"),
        open_folder(tmp_path / "settings.json", SETTINGS),
    ):
        pass


def test_a_folder_of_before_the_models_label_was_fixed_goes_on(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({**SETTINGS, "model_label": "policy"}))
    with open_folder(tmp_path, SETTINGS) as before:
        assert before == []
    (tmp_path / "settings.json").write_text(json.dumps({**SETTINGS, "model_label": "mine"}))
    with pytest.raises(ConfigError, match="is of something else"), open_folder(tmp_path, SETTINGS):
        pass


def test_a_start_that_was_killed_at_once_or_in_its_first_line_decides_nothing(tmp_path: Path) -> None:
    (tmp_path / "settings.json").touch()
    with open_folder(tmp_path, SETTINGS):
        pass
    (tmp_path / "results.jsonl").write_bytes(b'{"task": "t')
    with open_folder(tmp_path, {**SETTINGS, "temperature": 0.1}) as before:
        assert before == []
    assert json.loads((tmp_path / "settings.json").read_text())["temperature"] == 0.1


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        open_folder(tmp_path / "out", SETTINGS),
        pytest.raises(ConfigError, match="being written by this very process"),
        open_folder(tmp_path / "out", SETTINGS),
    ):
        pass
    with open_folder(tmp_path / "out", SETTINGS):
        pass


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    with runner(tmp_path) as rollouts:
        evaluate(rollouts, tmp_path / "out", build_tasks(2))
    path = tmp_path / "out" / "results.jsonl"
    good = path.read_bytes()
    path.write_bytes(b'{"task": "t"}\n' + good)
    with pytest.raises(RecordError, match=r"results\.jsonl, line 1: no result of a session .* Take the line out"):
        read_results(tmp_path / "out")


def test_two_tasks_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tasks have the id 'task/0'"):
        list_samples([*build_tasks(2), *build_tasks(1)], [], num_samples=1, max_attempts=1)


def test_each_task_once_then_each_a_second_time() -> None:
    order = [(s.task.id, s.sample, s.place) for s in list_samples(build_tasks(2), [], num_samples=2, max_attempts=1)]
    assert order == [("task/0", 0, 0), ("task/1", 0, 1), ("task/0", 1, 0), ("task/1", 1, 1)]


@pytest.mark.parametrize(
    ("metadata", "repo"),
    [
        ({}, None),
        ({"repo": "a/b"}, "a/b"),
        ({"swebench": {"repo": "django/django"}}, "django/django"),
        ({"harbor": {"metadata": {"package": "furl"}}}, "furl"),
    ],
)
def test_what_a_task_is_about(metadata: dict[str, Any], repo: str | None) -> None:
    assert find_repo(Task(id="t", instruction="x", metadata=metadata)) == repo


def test_a_line_that_another_process_tore_is_taken_back(tmp_path: Path) -> None:
    with runner(tmp_path) as rollouts:
        (first,) = evaluate(rollouts, tmp_path / "out", build_tasks(1))
        path = tmp_path / "out" / "results.jsonl"
        with path.open("ab") as file:
            file.write(path.read_bytes()[:40])
        samples = list_samples(build_tasks(2)[1:], [], num_samples=1, max_attempts=1)
        sample_tasks(rollouts, samples, tmp_path / "out", max_attempts=1)
    found = read_results(tmp_path / "out")
    assert (found[0], len(found), found[1].reward) == (first, 2, 1.0)
