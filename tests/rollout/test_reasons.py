"""Reasons: one name for sessions that ended alike, and what one of them said."""

from dataclasses import replace

import pytest
from records import build_call, build_rollout

from polar_trl.grade.base import describe_tests
from polar_trl.rollout.reasons import (
    ASKED,
    MAX_COMPLETION,
    OUT_OF_BUDGET,
    WINDOW,
    Reason,
    Repeats,
    count_reasons,
    find_cut,
    find_reason,
    find_shortfall,
    mask_numbers,
    name_cut,
)
from polar_trl.types import AgentExit, GradeReport, Message, Rollout, ToolCall

LOST = AgentExit(exit_code=127, output_tail="200\n\x1b[31msh: my-agent: not found\x1b[0m\n")
CALL = build_call(0, message=Message(role="assistant", text="done"))
CUT_CALL = replace(CALL, completion=replace(CALL.completion, finish_reason="length"))
TOOL_CALL = ToolCall(id="c", name="shell", arguments="{}")


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        (build_rollout(CALL, reward=0.0), None),
        (
            build_rollout(CALL, stop_reason="agent_failed", reward=0.0, agent_exit=LOST),
            "agent exit code 127: sh: my-agent: not found",
        ),
        (
            build_rollout(CALL, stop_reason="agent_failed", agent_exit=AgentExit(exit_code=139, signal="SIGSEGV")),
            "agent exit code 139 (SIGSEGV)",
        ),
        (
            build_rollout(
                stop_reason="no_calls", error="the agent got no answer", error_kind="no_calls", agent_exit=LOST
            ),
            "agent exit code 127 before its first call: sh: my-agent: not found",
        ),
        (
            build_rollout(
                stop_reason="no_calls",
                error="the agent got no answer",
                error_kind="no_calls",
                agent_exit=LOST,
                counters={"calls_aborted": 1},
            ),
            "the model answered no call of the agent (agent exit code 127): sh: my-agent: not found",
        ),
        (
            build_rollout(error="the grader failed:\n KeyError", error_kind="grader_failed"),
            "the grader failed: the grader failed: KeyError",
        ),
        (
            build_rollout(
                CALL, stop_reason="agent_timeout", agent_exit=AgentExit(exit_code=None, output_tail="a\nwaiting")
            ),
            "the agent ran into its time limit: waiting",
        ),
        (
            build_rollout(CALL, stop_reason="limit_exceeded", counters={"connections_exceeded": 1}),
            "the agent went past a limit of the proxy: connections_exceeded",
        ),
        (build_rollout(CALL, reward=0.0, counters={"budget_messages": 1}), OUT_OF_BUDGET),
        (
            build_rollout(CUT_CALL, stop_reason="agent_failed", agent_exit=AgentExit(exit_code=0)),
            name_cut(MAX_COMPLETION),
        ),
        # an agent that is judged by its exit code has no eye for it
        (build_rollout(CALL, CUT_CALL, reward=0.0), name_cut(MAX_COMPLETION)),
        (build_rollout(CUT_CALL, reward=None), name_cut(MAX_COMPLETION)),
        (build_rollout(CUT_CALL, reward=0.5, counters={"answers_cut_at_window": 1}), name_cut(WINDOW)),
        (build_rollout(CUT_CALL, reward=1.0), None),
        (build_rollout(CUT_CALL, CALL, reward=0.0), None),
        (
            build_rollout(
                replace(CALL, message=Message(role="assistant", tool_calls=(TOOL_CALL,))),
                stop_reason="agent_failed",
                agent_exit=AgentExit(exit_code=0, output_tail="bye"),
            ),
            "the agent ended with a tool call that was not run: bye",
        ),
        (
            build_rollout(
                replace(CALL, message=Message(role="assistant")),
                stop_reason="agent_failed",
                agent_exit=AgentExit(exit_code=0),
            ),
            "the last answer was empty",
        ),
        (build_rollout(CALL, stop_reason="agent_failed", agent_exit=AgentExit(exit_code=0)), "agent exit code 0"),
        # of earlier releases, which kept no exit
        (build_rollout(CALL, stop_reason="agent_failed"), "the session ended as agent_failed"),
    ],
)
def test_reasons(rollout: Rollout, reason: str | None) -> None:
    found = find_reason(rollout)
    assert (None if found is None else str(found)) == reason


def test_an_answer_that_was_cut_anywhere() -> None:
    title = replace(CUT_CALL, purpose="auxiliary")
    assert find_cut(build_rollout(CUT_CALL, CALL, reward=0.0)) == MAX_COMPLETION
    assert find_cut(build_rollout(CUT_CALL, counters={"answers_cut_at_asked_max_tokens": 1})) == ASKED
    assert find_cut(build_rollout(title, CALL)) is None is find_cut(build_rollout(CUT_CALL, CALL, reward=1.0))


def test_an_agent_that_failed_always_has_a_reason() -> None:
    for code in (None, 0, 1, 127, 137):
        assert find_reason(build_rollout(CALL, stop_reason="agent_failed", agent_exit=AgentExit(exit_code=code)))


def test_what_the_agent_printed_is_one_line_for_a_terminal() -> None:
    said = "x\n\x1b]0;title\x07\x1b[2Jgone\rback\u202e\x00 " + "y" * 400
    reason = find_reason(
        build_rollout(CALL, stop_reason="agent_failed", agent_exit=AgentExit(exit_code=1, output_tail=said))
    )
    assert reason is not None and reason.detail.isprintable() and len(reason.detail) == 300


def test_the_most_frequent_come_first_with_their_latest_words() -> None:
    reasons = [Reason(name="a", detail="1"), None, Reason(name="b", detail="2"), Reason(name="b", detail="3")]
    assert count_reasons(reasons) == [(Reason(name="b", detail="3"), 2), (Reason(name="a", detail="1"), 1)]


def test_tests_by_name() -> None:
    report = GradeReport(
        failed_tests=("a", "b", "c", "d"), missing_tests=("e",), num_tests=9, num_failed=4, num_missing=1
    )
    assert describe_tests(report) == "4 of 9 tests failed: a, b, c, ...; 1 of 9 tests were not found: e"
    assert describe_tests(GradeReport(num_tests=9, num_passed=9)) == "" == describe_tests(None)
    assert find_shortfall(build_rollout(reward=0.0, grading=report)).name == "tests failed"
    missing = find_shortfall(build_rollout(reward=0.0, grading=GradeReport(missing_tests=("e",), num_missing=1)))
    assert str(missing) == "tests were not found: 1 tests were not found: e"
    said = find_shortfall(build_rollout(reward=0.0, grading=GradeReport(output_tail="diff\nwrong answer")))
    assert str(said) == "the grader gave less than 1: wrong answer"


def test_repeats_are_told_ever_more_rarely() -> None:
    repeats = Repeats()
    assert [count for _ in range(20) if (count := repeats.note("a"))] == [1, 2, 4, 8, 16]
    assert repeats.note("b") == 1


def test_messages_that_differ_in_numbers_are_of_one_kind() -> None:
    one, other = (f"sandbox 3f2a91bc{n} gone after {n} s at 0xff{n}" for n in (1, 22))
    assert mask_numbers(one) == mask_numbers(other) == "sandbox N gone after N s at N"
