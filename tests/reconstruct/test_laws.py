"""Each law refuses the corruption that it is there for."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reconstruct_sessions import build_rollout, rollouts

from polar_trl.errors import LawError
from polar_trl.reconstruct import Reconstruction, build_prefix_merged, check_laws
from polar_trl.types import Rollout, Trajectory

# Ids 1 10 11 2 12 (calls 1 and 3), a retry's other copy (call 0), a sub-agent 7 20 (call 2), a title (call 4).
ROLLOUT = build_rollout(([1], [30]), ([1], [10, 11]), ([7], [20]), ([1, 10, 11, 2], [12]), ([9], [90], "auxiliary"))
GOOD = build_prefix_merged(ROLLOUT)


def put(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])


def change(**changes: Callable[[Trajectory], Any]) -> Callable[[Reconstruction], Reconstruction]:
    """Changes the fields of the first trajectory."""

    def corrupt(good: Reconstruction) -> Reconstruction:
        first, *rest = good.trajectories
        bad = replace(first, **{name: build(first) for name, build in changes.items()})
        return replace(good, trajectories=(bad, *rest))

    return corrupt


CORRUPTIONS: dict[str, tuple[Callable[[Reconstruction], Reconstruction], str]] = {
    "mask too short": (change(trainable=lambda t: t.trainable[:-1]), "'token_ids': 5, 'trainable': 4"),
    "logprobs too long": (change(logprobs=lambda t: (*t.logprobs, 0.0)), "'logprobs': 6"),
    "versions too short": (change(policy_versions=lambda t: t.policy_versions[1:]), "'policy_versions': 4"),
    "of another rollout": (change(rollout_id=lambda t: "other"), "belongs to rollout other"),
    "prompt id changed": (change(token_ids=lambda t: put(t.token_ids, 0, 5)), r"prompt ids differ .* \[5\] .* \[1\]"),
    "sampled id changed": (change(token_ids=lambda t: put(t.token_ids, 2, 5)), "sampled ids differ from position 1"),
    "id between spans changed": (change(token_ids=lambda t: put(t.token_ids, 3, 5)), "call 3: prompt ids differ"),
    "logprob changed": (change(logprobs=lambda t: put(t.logprobs, 4, -9.0)), r"logprobs differ .* \[-9.0\]"),
    "logprob shifted": (change(logprobs=lambda t: (*t.logprobs[1:], 0.0)), "logprobs differ"),
    "context trained": (change(trainable=lambda t: put(t.trainable, 3, True)), "before its span: trainable differ"),
    "context has logprob": (change(logprobs=lambda t: put(t.logprobs, 0, -1.0)), "before its span: logprobs differ"),
    "context has version": (change(policy_versions=lambda t: put(t.policy_versions, 0, 0)), "policy versions differ"),
    "sample untrained": (change(trainable=lambda t: put(t.trainable, 1, False)), "1 trainable tokens, 2 sampled"),
    "version too new": (
        change(policy_versions=lambda t: put(t.policy_versions, 1, 7)),
        "versions 0 to 7, sampled under 0 to 1",
    ),
    "call claimed but absent": (change(call_indices=lambda t: (2, 1, 3)), "call 2: prompt ids differ"),
    "call not in rollout": (change(call_indices=lambda t: (1, 9)), "trains call 9, but the rollout has calls 0 to 4"),
    "call listed twice": (change(call_indices=lambda t: (1, 1, 3)), "begins before the previous ended at 3"),
    "calls out of order": (change(call_indices=lambda t: (3, 1)), "before its span|begins before"),
    "call not listed": (change(call_indices=lambda t: (3,)), "call 3: before its span: trainable differ"),
    "truncated": (
        change(
            call_indices=lambda t: (1,),
            token_ids=lambda t: t.token_ids[:3],
            trainable=lambda t: t.trainable[:3],
            logprobs=lambda t: t.logprobs[:3],
            policy_versions=lambda t: t.policy_versions[:3],
        ),
        r"6 tokens were sampled, but 3 trained \+ 2 dropped",
    ),
    "no calls": (change(call_indices=lambda t: ()), "5 tokens, but its last call ends at 0"),
    "ids after the end": (
        change(
            token_ids=lambda t: (*t.token_ids, 8),
            trainable=lambda t: (*t.trainable, False),
            logprobs=lambda t: (*t.logprobs, 0.0),
            policy_versions=lambda t: (*t.policy_versions, -1),
        ),
        "6 tokens, but its last call ends at 5",
    ),
    "trajectory lost": (lambda good: replace(good, trajectories=good.trajectories[:1]), "6 tokens were sampled"),
    "trajectory twice": (
        lambda good: replace(good, trajectories=(*good.trajectories, good.trajectories[1])),
        r"calls \[2\] are trained in more than one place",
    ),
    "drop not counted": (lambda good: replace(good, dropped={"auxiliary": 1}), r"4 trained \+ 1 dropped"),
    "loss called superseded": (
        lambda good: replace(good, trajectories=good.trajectories[:1], dropped={"auxiliary": 1, "superseded": 2}),
        "2 tokens dropped as superseded, but the record has 1",
    ),
    "loss called auxiliary": (
        lambda good: replace(good, trajectories=good.trajectories[:1], dropped={"auxiliary": 2, "superseded": 1}),
        "2 tokens dropped as auxiliary, but the record has 1",
    ),
}


def test_the_untouched_reconstruction_passes() -> None:
    check_laws(ROLLOUT, GOOD)
    assert [row.call_indices for row in GOOD.trajectories] == [(1, 3), (2,)]
    assert GOOD.dropped == {"superseded": 1, "auxiliary": 1}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_refused(name: str) -> None:
    corrupt, reason = CORRUPTIONS[name]
    with pytest.raises(LawError, match=reason) as caught:
        check_laws(ROLLOUT, corrupt(GOOD))
    assert str(caught.value).startswith("rollout s")


def test_a_trained_auxiliary_call_is_refused() -> None:
    as_policy = replace(ROLLOUT, calls=(*ROLLOUT.calls[:4], replace(ROLLOUT.calls[4], purpose="policy")))
    with pytest.raises(LawError, match=r"auxiliary calls \[4\] are trained"):
        check_laws(ROLLOUT, build_prefix_merged(as_policy))


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 1e-6])
@pytest.mark.parametrize("index", [1, 0])
def test_a_sampled_log_probability_that_is_none_is_refused(logprob: float, index: int) -> None:
    call = ROLLOUT.calls[index]  # trained, and dropped as superseded
    bad = replace(call, completion=replace(call.completion, logprobs=put(call.completion.logprobs, 0, logprob)))
    rollout = replace(ROLLOUT, calls=put(ROLLOUT.calls, index, bad))
    with pytest.raises(LawError, match=rf"rollout s, call {index}: sampled token 0 has log-probability {logprob};"):
        check_laws(rollout, build_prefix_merged(rollout))


def test_a_rollout_that_misses_calls_is_refused() -> None:
    cut = replace(ROLLOUT, calls=ROLLOUT.calls[1:])
    with pytest.raises(LawError, match=r"indices \[1, 2, 3, 4\], expected 0 to 3"):
        check_laws(cut, GOOD)


@settings(max_examples=300, deadline=None)
@given(rollouts(), st.data())
def test_any_single_changed_value_is_refused(rollout: Rollout, data: st.DataObject) -> None:
    good = build_prefix_merged(rollout)
    assume(good.trajectories)
    which = data.draw(st.integers(0, len(good.trajectories) - 1))
    row = good.trajectories[which]
    position = data.draw(st.integers(0, len(row.token_ids) - 1))
    name, value = data.draw(
        st.sampled_from(
            [("token_ids", 99), ("trainable", not row.trainable[position]), ("logprobs", 1.0), ("policy_versions", 99)]
        )
    )
    changes: dict[str, Any] = {name: put(getattr(row, name), position, value)}
    bad = replace(row, **changes)
    with pytest.raises(LawError):
        check_laws(rollout, replace(good, trajectories=put(good.trajectories, which, bad)))
