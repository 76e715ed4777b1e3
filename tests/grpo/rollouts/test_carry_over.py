"""Test sessions that stay open over a training step: real proxy, sockets, local sandboxes, and a scripted engine."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from open_sessions import REPLY, TURN, open_sessions
from open_sessions import __file__ as open_sessions_file
from serving import wait_until

from polar_trl.errors import EngineError
from polar_trl.rollout.runner import Job, RolloutResult
from polar_trl.types import Task


def versions(result: RolloutResult) -> list[int]:
    (trajectory,) = result.reconstruction.trajectories
    return [v for v, trainable in zip(trajectory.policy_versions, trajectory.trainable, strict=True) if trainable]


def test_a_session_is_held_across_a_policy_change(tmp_path: Path) -> None:
    """The session lives on pings, its clock stands still, and every token knows its version."""
    with open_sessions(tmp_path, max_policy_lag=1) as sessions:
        sessions.start_group("g", f"{TURN}; {sessions.build_wait('go')}; {TURN}", agent_timeout_s=8.0)
        sessions.wait_for_calls(1)
        sessions.proxy.hold()
        (tmp_path / "go").touch()
        (gate_stats,) = sessions.gate_stats()
        # longer than the client waits in silence, and than the agent may take
        wait_until(lambda: gate_stats.held_s > 9.0)
        assert len(sessions.engine.params) == 1
        sessions.change_policy()
        (result,) = sessions.runner.take(1)
    rollout = result.rollout
    assert (rollout.stop_reason, rollout.error, rollout.reward) == ("completed", None, 1.0)
    assert [call.completion.first_policy_version for call in rollout.calls] == [0, 1]
    assert [call.completion.last_policy_version for call in rollout.calls] == [0, 1]
    assert versions(result) == [0] * len(REPLY) + [1] * len(REPLY)
    assert rollout.seconds["held"] > 9.0
    assert rollout.seconds["agent"] < 8.0
    assert rollout.counters.get("calls_aborted", 0) == 0


def test_an_agent_that_needs_no_model_is_stopped_at_its_limit_while_held(tmp_path: Path) -> None:
    with open_sessions(tmp_path) as sessions:
        sessions.start_group("g", f"{TURN}; sleep 600", agent_timeout_s=3.0)
        sessions.wait_for_calls(1)
        sessions.proxy.hold()
        (result,) = sessions.runner.take(1)
    assert (result.rollout.stop_reason, result.rollout.reward) == ("agent_timeout", 1.0)
    assert versions(result) == [0] * len(REPLY)


def test_what_needs_no_model_goes_on_while_held(tmp_path: Path) -> None:
    """One session is graded meanwhile; another is begun, prepared, and has the new policy from its first token on."""
    with open_sessions(
        tmp_path, grade=lambda task, box: wait_until((tmp_path / "grade").exists) or 1.0, max_policy_lag=1
    ) as sessions:
        sessions.start_group("old", TURN)
        sessions.wait_for_calls(1)
        sessions.proxy.hold()
        sessions.start_group("new", TURN)
        wait_until(lambda: sessions.gate_stats()[1].held_s > 0.0)
        (tmp_path / "grade").touch()
        (old,) = sessions.runner.take(1)
        sessions.change_policy()
        (new,) = sessions.runner.take(1)
    assert (old.rollout.reward, versions(old)) == (1.0, [0] * len(REPLY))
    assert (new.rollout.reward, versions(new)) == (1.0, [1] * len(REPLY))


def test_holding_waits_for_calls_in_flight(tmp_path: Path) -> None:
    """A call that changes its mind about the policy half-way would be told by its last version."""
    with open_sessions(tmp_path) as sessions:
        sessions.engine.delay_s = 0.5
        sessions.start_group("g", TURN)
        sessions.wait_for_calls(1)
        sessions.proxy.hold()
        sessions.change_policy()
        (result,) = sessions.runner.take(1)
    (call,) = result.rollout.calls
    assert (call.completion.first_policy_version, call.completion.last_policy_version) == (0, 0)


def test_the_older_group_is_waited_for_although_a_newer_one_has_finished(tmp_path: Path) -> None:
    with open_sessions(tmp_path, max_policy_lag=1) as sessions:
        sessions.start_group("a", f"{TURN}; {sessions.build_wait('a')}")
        sessions.wait_for_calls(1)  # its first token has version 0
        sessions.start_group("b", TURN)
        assert [result.rollout.id for result in sessions.runner.take(1)] == ["b-r0"]
        assert [[job.rollout_id for job in group] for group in sessions.runner.open_jobs()] == [["a-r0"]]
        sessions.proxy.hold()
        sessions.start_group("c", TURN)
        sessions.change_policy()
        wait_until(lambda: sessions.runner._groups[1].report().num_ended == 1)
        (tmp_path / "a").touch()
        taken = sessions.runner.take(1)
        assert [result.rollout.id for result in taken] == ["a-r0"]
        sessions.proxy.hold()
        sessions.change_policy()
        (last,) = sessions.runner.take(1)
        assert sessions.runner.open_jobs() == []
    assert versions(last) == [1] * len(REPLY)


def test_more_or_fewer_groups_than_can_be_taken_are_refused(tmp_path: Path) -> None:
    with open_sessions(tmp_path) as sessions:
        with pytest.raises(ValueError, match="0 groups are open"):
            sessions.runner.take(1)
        sessions.start_group("a", TURN)
        sessions.start_group("b", TURN)
        with pytest.raises(ValueError, match="2 groups are open: 1 can be taken of 1 to 1 open ones"):
            sessions.runner.take(1)
        with pytest.raises(ValueError, match=r"groups \['b'\] are open already"):
            sessions.start_group("b", TURN)
        assert len(sessions.runner.take(2)) == 2


def test_the_group_that_finished_first_is_taken_whatever_its_age(tmp_path: Path) -> None:
    with open_sessions(tmp_path) as sessions:
        with pytest.raises(ValueError, match="no group is open"):
            sessions.runner.take_finished()
        sessions.start_group("a", f"{TURN}; {sessions.build_wait('a')}")
        sessions.start_group("b", TURN, f"{TURN}; {sessions.build_wait('b')}")
        sessions.start_group("c", TURN)
        assert [result.rollout.id for result in sessions.runner.take_finished()] == ["c-r0"]
        (tmp_path / "b").touch()
        assert [result.rollout.id for result in sessions.runner.take_finished()] == ["b-r0", "b-r1"]
        (tmp_path / "a").touch()
        assert [result.rollout.id for result in sessions.runner.take_finished()] == ["a-r0"]
        assert sessions.runner.open_jobs() == []


def test_the_oldest_version_to_train_follows_the_policy(tmp_path: Path) -> None:
    with open_sessions(tmp_path, max_policy_lag=2) as sessions:
        sessions.change_policy()
        assert sessions.runner.oldest_version == -1


def test_a_batch_of_its_own_runs_beside_open_groups(tmp_path: Path) -> None:
    """An evaluation between two training steps."""
    with open_sessions(tmp_path) as sessions:
        sessions.start_group("train", f"{TURN}; {sessions.build_wait('go')}")
        jobs = [Job(rollout_id=f"e{i}", group_id="eval", task=Task(id="t", instruction=TURN)) for i in range(2)]
        assert [result.rollout.id for result in sessions.runner.run(jobs)] == ["e0", "e1"]
        assert [[job.rollout_id for job in group] for group in sessions.runner.open_jobs()] == [["train-r0"]]
        (tmp_path / "go").touch()
        (result,) = sessions.runner.take(1)
    assert result.rollout.reward == 1.0


def test_closing_while_held_leaves_nothing(tmp_path: Path) -> None:
    with open_sessions(tmp_path) as sessions:
        sessions.proxy.hold()
        sessions.start_group("g", TURN, TURN)
        sessions.wait_until_held()
        sessions.runner.close()
        assert list((tmp_path / "boxes").glob("*")) == []
        assert sessions.runner.open_jobs() == []
    assert sessions.engine.params == []


def test_an_interrupt_while_held_leaves_nothing(tmp_path: Path) -> None:
    with open_sessions(tmp_path) as sessions:
        sessions.proxy.hold()
        sessions.start_group("g", TURN)
        (gate_stats,) = sessions.gate_stats()

        def interrupt() -> None:
            wait_until(lambda: gate_stats.held_s > 0.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sessions.runner.take(1)
        thread.join()
        assert list((tmp_path / "boxes").glob("*")) == []


def test_an_engine_that_failed_while_held_fails_all(tmp_path: Path) -> None:
    def fail(prompt: tuple[int, ...]) -> tuple[int, ...]:
        raise EngineError("the weights did not load")

    with open_sessions(tmp_path, reply=fail) as sessions:
        sessions.proxy.hold()
        sessions.start_group("g", TURN, TURN)
        sessions.wait_until_held()
        sessions.proxy.release()
        group = sessions.runner.take(1)
    assert [result.rollout.reward for result in group] == [None, None]
    assert ["failed on our side" in (result.rollout.error or "") for result in group] == [True, True]


def test_a_group_is_graded_while_others_still_run(tmp_path: Path) -> None:
    """The second group's agent goes on only once the first group was graded."""

    def grade(task: Task, box: Any) -> float:
        (tmp_path / "graded").touch()
        return 1.0

    with open_sessions(tmp_path, grade=grade) as sessions:
        sessions.start_group("a", TURN)
        sessions.start_group("b", f"{sessions.build_wait('graded')}; {TURN}", agent_timeout_s=60.0)
        results = sessions.runner.take(2)
    assert [result.rollout.stop_reason for result in results] == ["completed", "completed"]


def test_stragglers_are_cut_and_keep_their_traces(tmp_path: Path) -> None:
    with open_sessions(tmp_path, straggler_quantile=0.5) as sessions:
        quick = f"{sessions.build_wait('asked')}; {TURN}"
        sessions.start_group("g", f"{TURN}; sleep 600", quick, quick, f"{TURN}; sleep 600")
        sessions.wait_for_calls(2)  # an agent that is cut before its first answer would have no trace
        (tmp_path / "asked").touch()
        group = sessions.runner.take(1)
    reasons = [result.rollout.stop_reason for result in group]
    assert (reasons[0], reasons[3]) == ("straggler", "straggler")
    for result in group:
        assert (result.rollout.reward, result.rollout.error) == (1.0, None)
        assert versions(result) == [0] * len(REPLY)


def test_a_process_that_fails_with_sessions_open_ends_and_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, open_sessions_file, str(tmp_path)], timeout=600, check=False)
    assert ended.returncode == 7
    assert list((tmp_path / "boxes").glob("*")) == []
