"""mini-swe-agent as PyPI ships it: replies that it takes out of its history, and how it ends."""

import pytest
from sessions import BusyEngine, run_session, say
from test_three_turns import count_drifted

from polar_trl.harness.mini_swe_agent import MiniSWEAgentHarness

HARNESS = MiniSWEAgentHarness()
LAST_TEXT, LAST_CALLS = HARNESS.build_last_message("Done.")
END = say(LAST_TEXT, *LAST_CALLS)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


def test_a_reply_without_a_call_is_trained_on_its_own() -> None:
    replies = [say("", HARNESS.build_shell_call("printf one > one.txt")), say("I think that is it."), END]
    finished = run_session(HARNESS, replies, grader="test -f one.txt")
    rollout = finished.rollout
    # the complaint takes the reply's place, so the prompt after it has as many assistant turns as the one before
    assert (rollout.reward, rollout.stop_reason) == (1.0, "agent_failed")
    assert count_drifted(rollout) >= 1
    trained = sum(sum(row.trainable) for row in finished.reconstruction.trajectories)
    dropped = sum(finished.reconstruction.dropped.values())
    assert trained + dropped == sum(len(call.completion.token_ids) for call in rollout.calls)


def test_a_busy_engine_is_asked_again() -> None:
    engine = BusyEngine([say("", HARNESS.build_shell_call("printf one > one.txt")), END])
    finished = run_session(HARNESS, engine)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert len(finished.reconstruction.trajectories) == 1
