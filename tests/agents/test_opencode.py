"""OpenCode as npm ships it: its other APIs, wrong calls, the short prompt."""

import pytest
from sessions import BusyEngine, call_tool, purposes, run_session, say
from test_three_turns import GRADER, build_replies, count_drifted

from polar_trl.harness.opencode import OpenCodeHarness

HARNESS = OpenCodeHarness()


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    HARNESS.install()


@pytest.mark.parametrize("api", ["openai-responses", "anthropic", "google"])
def test_three_turns_through_each_other_api(api: str) -> None:
    harness = OpenCodeHarness(api=api, short_prompt=api == "anthropic")  # type: ignore[arg-type]
    finished = run_session(harness, build_replies(harness), grader=GRADER)
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (count_drifted(rollout), len(finished.reconstruction.trajectories)) == (0, 1)
    assert set(purposes(rollout)) == {"p"}


def test_a_call_that_does_not_parse_is_renamed_and_starts_a_trajectory() -> None:
    replies = [say("", call_tool("bash", '{"command": "pri')), say("", call_tool("nothing", "{}")), say("I give up.")]
    finished = run_session(HARNESS, replies)
    assert (finished.rollout.stop_reason, len(finished.rollout.calls)) == ("completed", 3)
    assert len(finished.reconstruction.trajectories) == 3


def test_a_busy_engine_is_asked_again() -> None:
    engine = BusyEngine([say("", HARNESS.build_shell_call("printf one > one.txt")), say("end")])
    finished = run_session(HARNESS, engine)
    assert (finished.rollout.stop_reason, finished.rollout.counters) == ("completed", {"calls_sent_back": 1})
    assert len(finished.reconstruction.trajectories) == 1
