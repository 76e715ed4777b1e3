"""What a run says of steps that taught nothing and of sessions that failed."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from polar_trl.grpo.logs.lessons import Batch, Lessons, find_no_lesson
from polar_trl.grpo.logs.reasons_file import REASONS_FILE, summarize_reasons
from polar_trl.rollout.reasons import ASKED, BEFORE_FIRST_CALL, MAX_COMPLETION, WINDOW, Reason, name_cut

LOST = Reason(name="agent exit code 127", detail="sh: my-agent: not found")
CUT = Reason(name=name_cut(MAX_COMPLETION))
NAN = math.nan


def batch(rewards: list[float], *reasons: Reason | None, **fields: Any) -> Batch:
    every = [(reason, f"sessions/p/r{n}.jsonl") for n, reason in enumerate(reasons or [None] * len(rewards))]
    values = {"step": 1, "mode": "train", "has_advantage": False, "group_size": 2, "reasons": every}
    return Batch(rewards=rewards, **(values | fields))


@pytest.mark.parametrize(
    ("given", "why", "advice"),
    [
        (batch([0, 1], has_advantage=True, num_rows=2), None, None),
        (batch([0, 0, 0, 0]), "all 4 rewards are 0", "easier tasks"),
        (batch([1, 1, NAN, 1]), "all 3 rewards are 1", "harder tasks"),
        (batch([0, 0, 1, 1]), "the 2 rewards of each group are equal, from 0 to 1 between groups", "num_generations"),
        (
            batch([0, 0, 0, 0], LOST, LOST, LOST, None),
            "all 4 rewards are 0; 3 of 4 sessions: agent exit code 127: sh: my-agent: not found",
            "agent_command",
        ),
        (batch([0, 0], CUT, CUT), f"sessions: {CUT}", "max_completion_length higher"),
        (
            batch([NAN, 0, 0, 0.5, 0.5], *[Reason(name=name_cut(WINDOW))] * 3, None, None),
            "from 0 to 0.5 between groups; 3 of 5 sessions: the last answer was cut at the context window",
            "vllm_max_model_length higher",
        ),
        (
            batch([0, 0, 0, 0], cuts=[MAX_COMPLETION, None, MAX_COMPLETION, None]),
            "all 4 rewards are 0; answers of 2 of 4 sessions were cut at max_completion_length",
            "max_completion_length higher",
        ),
        (
            batch([0, 0, 0, 0], *[Reason(name="agent exit code 1")] * 4, cuts=[ASKED, ASKED, ASKED, None]),
            "4 of 4 sessions: agent exit code 1; answers of 3 of 4 sessions were cut at the max_tokens that",
            "have the agent ask for longer answers",
        ),
        (batch([0, 0, 0, 0], LOST, LOST, cuts=[ASKED] * 4), "not found", "agent_command"),  # what is sure comes first
        (batch([0, 0, 0, 0], cuts=[MAX_COMPLETION, None, None, None]), "all 4 rewards are 0", "easier tasks"),
        (batch([1, 1], CUT, CUT, cuts=[MAX_COMPLETION] * 2), "all 2 rewards are 1", "harder tasks"),
        (
            batch([NAN, NAN], *[Reason(name=LOST.name + BEFORE_FIRST_CALL)] * 2),
            "2 of 2 sessions: agent exit code 127 before its first call",
            "agent_command",
        ),
        (
            batch([NAN, NAN], *[Reason(name="agent exit code 2" + BEFORE_FIRST_CALL)] * 2),
            "2 of 2 sessions: agent exit code 2 before its first call",
            "polar-trl doctor",
        ),
        (
            batch([NAN, NAN], LOST, LOST),
            "no session got a reward; 2 of 2 sessions: agent exit",
            "agent_command",
        ),
        (batch([NAN, NAN]), "no session got a reward: the reward functions gave none", "give a number"),
        (
            batch([0, 1], has_advantage=True, dropped={"polar/dropped/too_long": 9.0, "polar/dropped/auxiliary": 1.0}),
            "were dropped (too_long)",
            "max_trajectory_tokens higher",
        ),
    ],
)
def test_why_a_step_taught_nothing(given: Batch, why: str | None, advice: str | None) -> None:
    found = find_no_lesson(given)
    if why is None or advice is None:
        assert found is None
    else:
        assert found is not None and why in found.why and advice in found.advice


def test_a_run_warns_at_first_and_as_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lessons = Lessons(tmp_path, "a")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 10):
            lessons.note(batch([0, 0, 0], LOST, LOST, None, step=step))
        lessons.note(batch([0, 1, 0], LOST, None, None, step=10, has_advantage=True, num_rows=3))
        lessons.on_train_end(None, None, None)
    said = [record.getMessage() for record in caplog.records]
    failed = f"step 1: 2 of 3 sessions: {LOST}; see {tmp_path}/sessions/p/r1.jsonl"
    assert said[0] == failed
    assert [line.split()[1] for line in said if " sessions: agent" in line and "see " in line] == [
        "1:", "2:", "4:", "8:",
    ]  # fmt: skip
    taught = [line for line in said if line.startswith("step") and "taught nothing" in line]
    assert [line.split()[1] for line in taught] == ["1", "2", "4", "8"]
    assert "step 8 taught nothing (8 of 8 steps so far): all 3 rewards are 0; 2 of 3 sessions" in taught[-1]
    assert said[-1].startswith("9 of 10 steps taught nothing; 9 of them: all 3 rewards are 0")
    assert all(line.endswith(f". Look at sessions: polar-trl inspect {tmp_path}") for line in [*taught, said[-1]])
    assert len(said) == 9


def test_the_summary_counts_each_step_once(tmp_path: Path) -> None:
    for attempt, step, reasons in (
        ("a", 1, [LOST, LOST]),
        ("a", 2, [LOST, LOST]),
        ("b", 2, [None, None]),
        ("b", 2, [LOST, None]),
    ):
        Lessons(tmp_path, attempt).note(batch([0, 0], *reasons, step=step))
    Lessons(tmp_path, "b").note(batch([0, 0], LOST, LOST, mode="eval"))
    with (tmp_path / REASONS_FILE).open("a") as file:
        file.write('{"step": 8, "mode": "train", "attempt": "b", "reasons": [{}]}\n{"step": 9, "mo')
    assert summarize_reasons(tmp_path) == {
        "reasons": [
            {"reason": LOST.name, "sessions": 3, "example": LOST.detail, "record": "sessions/p/r0.jsonl"},
        ],
        "steps_that_taught_nothing": 2,
        "taught_nothing": f"all 2 rewards are 0; 1 of 2 sessions: {LOST}",
        "try": "let the agent's command be found in the sandbox (agent_command, agent_folders, sandbox_image)",
    }
    assert len([json.loads(line) for line in (tmp_path / REASONS_FILE).read_text().splitlines()[:-1]]) == 6
    assert summarize_reasons(tmp_path / "none") == {"reasons": [], "steps_that_taught_nothing": 0}
