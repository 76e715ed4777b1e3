"""Sessions that stay open over a training step: real proxy, sockets and local sandboxes, and a scripted engine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import wait_until

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.gate import GateStats
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineError
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, Task

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
IDLE_S = 2.0
ASK = f"""
import http.client, json, os, pathlib
chat = pathlib.Path("chat.json")
messages = json.loads(chat.read_text()) if chat.exists() else []
messages.append({{"role": "user", "content": "go on"}})
connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2], timeout={IDLE_S})
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
connection.request("POST", "/v1/chat/completions", json.dumps({{"messages": messages, "stream": True}}), headers)
answer = connection.getresponse().read()  # raises after {IDLE_S} s without a byte
assert b"[DONE]" in answer, answer
chat.write_text(json.dumps([*messages, {{"role": "assistant", "content": "done"}}]))
"""
TURN = "python3 -I -S ~/ask.py"
WAIT = "while ! test -e {} ; do sleep 0.02; done"


class Bench:
    """A runner, its engine, and files on which agents and graders wait."""

    def __init__(self, root: Path, runner: RolloutRunner, engine: ScriptedEngine) -> None:
        self.runner = runner
        self.proxy = runner.proxy
        self.engine = engine
        self._root = root

    def file(self, name: str) -> Path:
        return self._root / name

    def touch(self, name: str) -> None:
        self.file(name).touch()

    def wait(self, name: str) -> str:
        """The shell command that waits for `touch`."""
        return WAIT.format(self.file(name))

    def start(self, group_id: str, *scripts: str, **task: Any) -> None:
        self.runner.start(
            [
                Job(
                    rollout_id=f"{group_id}-r{index}",
                    group_id=group_id,
                    task=Task(id="t", instruction=script, **task),
                    record_path=self._root / f"{group_id}-r{index}.jsonl",
                )
                for index, script in enumerate(scripts)
            ]
        )

    def wait_for_calls(self, count: int) -> None:
        """Until the engine has been asked that often in all."""
        wait_until(lambda: len(self.engine.params) >= count)

    def gate_stats(self) -> list[GateStats]:
        return [member.session.gate_stats for group in self.runner._groups for member in group.members]

    def change_policy(self) -> None:
        self.engine.policy_version += 1


@contextmanager
def bench(
    root: Path,
    *,
    grade: Callable[..., Any] = lambda task, box: 1.0,
    reply: Callable[..., Any] = lambda prompt: REPLY,
    **config: Any,
) -> Iterator[Bench]:
    engine = ScriptedEngine(reply)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50), ping_interval_s=0.1) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(root / "boxes"),
            harness=ShellHarness("bash -ec {instruction}", files={"ask.py": ASK}),
            grader=FunctionGrader(grade),
            config=RolloutConfig(**config),
        )
        try:
            yield Bench(root, runner, engine)
        finally:
            runner.close()
    assert list((root / "boxes").glob("*")) == [], "a sandbox was left behind"


def versions(result: RolloutResult) -> list[int]:
    (trajectory,) = result.reconstruction.trajectories
    return [v for v, trainable in zip(trajectory.policy_versions, trajectory.trainable, strict=True) if trainable]


def test_a_session_is_held_across_a_policy_change(tmp_path: Path) -> None:
    """It lives on pings, its clock stands still, and every token knows its version."""
    with bench(tmp_path, max_policy_lag=1) as it:
        it.start("g", f"{TURN}; {it.wait('go')}; {TURN}", agent_timeout_s=5.0)
        it.wait_for_calls(1)
        it.proxy.hold()
        it.touch("go")
        (gate_stats,) = it.gate_stats()
        wait_until(
            lambda: gate_stats.held_s > 6.0
        )  # longer than the client waits in silence, and than the agent may take
        assert len(it.engine.params) == 1
        it.change_policy()
        it.proxy.release()
        ((result,),) = it.runner.take(1)
    rollout = result.rollout
    assert (rollout.stop_reason, rollout.error, rollout.reward) == ("completed", None, 1.0)
    assert [call.completion.first_policy_version for call in rollout.calls] == [0, 1]
    assert [call.completion.last_policy_version for call in rollout.calls] == [0, 1]
    assert versions(result) == [0] * len(REPLY) + [1] * len(REPLY)
    assert rollout.seconds["held"] > 6.0
    assert rollout.seconds["agent"] < 5.0
    assert rollout.counters.get("calls_aborted", 0) == 0


def test_an_agent_that_needs_no_model_is_stopped_at_its_limit_while_held(tmp_path: Path) -> None:
    with bench(tmp_path) as it:
        it.start("g", f"{TURN}; sleep 600", agent_timeout_s=3.0)
        it.wait_for_calls(1)
        it.proxy.hold()
        ((result,),) = it.runner.take(1)
    assert (result.rollout.stop_reason, result.rollout.reward) == ("agent_timeout", 1.0)
    assert versions(result) == [0] * len(REPLY)


def test_what_needs_no_model_goes_on_while_held(tmp_path: Path) -> None:
    """One session is graded meanwhile; another is begun, prepared, and has the new policy from its first token on."""

    def grade(task: Task, box: Any) -> float:
        wait_until((tmp_path / "grade").exists)
        return 1.0

    with bench(tmp_path, grade=grade, max_policy_lag=1) as it:
        it.start("old", TURN)
        it.wait_for_calls(1)
        it.proxy.hold()
        it.start("new", TURN)
        wait_until(lambda: it.gate_stats()[1].held_s > 0.0)
        it.touch("grade")
        ((old,),) = it.runner.take(1)
        it.change_policy()
        it.proxy.release()
        ((new,),) = it.runner.take(1)
    assert (old.rollout.reward, versions(old)) == (1.0, [0] * len(REPLY))
    assert (new.rollout.reward, versions(new)) == (1.0, [1] * len(REPLY))


def test_holding_waits_for_calls_in_flight(tmp_path: Path) -> None:
    """A call that changes its mind about the policy half-way would be told by its last version."""
    with bench(tmp_path) as it:
        it.engine.delay_s = 0.5
        it.start("g", TURN)
        it.wait_for_calls(1)
        it.proxy.hold()
        it.change_policy()
        ((result,),) = it.runner.take(1)
    (call,) = result.rollout.calls
    assert (call.completion.first_policy_version, call.completion.last_policy_version) == (0, 0)


def test_the_older_group_is_waited_for_although_a_newer_one_has_finished(tmp_path: Path) -> None:
    with bench(tmp_path, max_policy_lag=1) as it:
        it.start("a", f"{TURN}; {it.wait('a')}")
        it.wait_for_calls(1)  # its first token has version 0
        it.start("b", TURN)
        assert [[r.rollout.id for r in group] for group in it.runner.take(1)] == [["b-r0"]]
        assert [[job.rollout_id for job in group] for group in it.runner.open_jobs()] == [["a-r0"]]
        it.proxy.hold()
        it.start("c", TURN)
        it.change_policy()
        it.proxy.release()
        wait_until(lambda: it.runner._groups[1].is_finished)
        it.touch("a")
        taken = it.runner.take(1)
        assert [[r.rollout.id for r in group] for group in taken] == [["a-r0"]]
        it.proxy.hold()
        it.change_policy()
        it.proxy.release()
        ((last,),) = it.runner.take(1)
        assert it.runner.open_jobs() == []
    assert versions(last) == [1] * len(REPLY)


def test_more_or_fewer_groups_than_can_be_taken_are_refused(tmp_path: Path) -> None:
    with bench(tmp_path) as it:
        with pytest.raises(ValueError, match="0 groups are open"):
            it.runner.take(1)
        it.start("a", TURN)
        it.start("b", TURN)
        with pytest.raises(ValueError, match="2 groups are open: 1 can be taken of 1 to 1 open ones"):
            it.runner.take(1)
        with pytest.raises(ValueError, match=r"groups \['b'\] are open already"):
            it.start("b", TURN)
        assert len(it.runner.take(2)) == 2


def test_the_group_that_finished_first_is_taken_whatever_its_age(tmp_path: Path) -> None:
    with bench(tmp_path) as it:
        with pytest.raises(ValueError, match="no group is open"):
            it.runner.take_finished()
        it.start("a", f"{TURN}; {it.wait('a')}")
        it.start("b", TURN, f"{TURN}; {it.wait('b')}")
        it.start("c", TURN)
        assert [result.rollout.id for result in it.runner.take_finished()] == ["c-r0"]
        it.touch("b")
        assert [result.rollout.id for result in it.runner.take_finished()] == ["b-r0", "b-r1"]
        it.touch("a")
        assert [result.rollout.id for result in it.runner.take_finished()] == ["a-r0"]
        assert it.runner.open_jobs() == []


def test_the_oldest_version_to_train_follows_the_policy(tmp_path: Path) -> None:
    with bench(tmp_path, max_policy_lag=2) as it:
        it.change_policy()
        assert it.runner.oldest_version == -1


def test_a_batch_of_its_own_runs_beside_open_groups(tmp_path: Path) -> None:
    """An evaluation between two training steps."""
    with bench(tmp_path) as it:
        it.start("train", f"{TURN}; {it.wait('go')}")
        jobs = [Job(rollout_id=f"e{i}", group_id="eval", task=Task(id="t", instruction=TURN)) for i in range(2)]
        assert [result.rollout.id for result in it.runner.run(jobs)] == ["e0", "e1"]
        assert [[job.rollout_id for job in group] for group in it.runner.open_jobs()] == [["train-r0"]]
        it.touch("go")
        ((result,),) = it.runner.take(1)
    assert result.rollout.reward == 1.0


def test_closing_while_held_leaves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as it:
        it.proxy.hold()
        it.start("g", TURN, TURN)
        wait_until(lambda: all(gate_stats.held_s > 0.0 for gate_stats in it.gate_stats()))
        it.runner.close()
        assert list((tmp_path / "boxes").glob("*")) == []
        assert it.runner.open_jobs() == []
    assert it.engine.params == []


def test_an_interrupt_while_held_leaves_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as it:
        it.proxy.hold()
        it.start("g", TURN)
        (gate_stats,) = it.gate_stats()

        def interrupt() -> None:
            wait_until(lambda: gate_stats.held_s > 0.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            it.runner.take(1)
        thread.join()
        assert list((tmp_path / "boxes").glob("*")) == []


def test_an_engine_that_failed_while_held_fails_all(tmp_path: Path) -> None:
    def fail(prompt: tuple[int, ...]) -> tuple[int, ...]:
        raise EngineError("the weights did not load")

    with bench(tmp_path, reply=fail) as it:
        it.proxy.hold()
        it.start("g", TURN, TURN)
        wait_until(lambda: all(gate_stats.held_s > 0.0 for gate_stats in it.gate_stats()))
        it.proxy.release()
        (group,) = it.runner.take(1)
    assert [result.rollout.reward for result in group] == [None, None]
    assert ["failed on our side" in (result.rollout.error or "") for result in group] == [True, True]


def test_a_group_is_graded_while_others_still_run(tmp_path: Path) -> None:
    """The second group's agent goes on only once the first group was graded."""

    def grade(task: Task, box: Any) -> float:
        (tmp_path / "graded").touch()
        return 1.0

    with bench(tmp_path, grade=grade) as it:
        it.start("a", TURN)
        it.start("b", f"{it.wait('graded')}; {TURN}", agent_timeout_s=60.0)
        groups = it.runner.take(2)
    assert [result.rollout.stop_reason for group in groups for result in group] == ["completed", "completed"]


def test_stragglers_are_cut_and_keep_their_traces(tmp_path: Path) -> None:
    with bench(tmp_path, straggler_quantile=0.5) as it:
        quick = f"{it.wait('asked')}; {TURN}"
        it.start("g", f"{TURN}; sleep 600", quick, quick, f"{TURN}; sleep 600")
        it.wait_for_calls(2)  # an agent that is cut before its first answer would have no trace
        it.touch("asked")
        (group,) = it.runner.take(1)
    reasons = [result.rollout.stop_reason for result in group]
    assert (reasons[0], reasons[3]) == ("straggler", "straggler")
    for result in group:
        assert (result.rollout.reward, result.rollout.error) == (1.0, None)
        assert versions(result) == [0] * len(REPLY)


CRASH = f"""
import sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_carry_over import TURN, bench, wait_until
root = Path(sys.argv[1])
engine_side = bench(root)
it = engine_side.__enter__()
it.proxy.hold()
it.start("g", TURN)
wait_until(lambda: it.gate_stats()[0].held_s > 0.0)
raise SystemExit(7)
"""


def test_a_process_that_fails_with_sessions_open_ends_and_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == 7
    assert list((tmp_path / "boxes").glob("*")) == []
