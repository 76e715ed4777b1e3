"""Tokens of a rollout are trained, or counted by the reason why not."""

from reconstruct_sessions import build_call

from polar_trl.grpo.rows import build_rows
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.reconstruct.truncate import truncate_trajectory
from polar_trl.rollout.runner import RolloutResult
from polar_trl.types import Rollout


def build_result(*, num_turns: int = 4) -> RolloutResult:
    """Turn t samples two tokens under policy version t, on a prompt of 3 t + 1 tokens."""
    history: tuple[int, ...] = (0,)
    calls = []
    for turn in range(num_turns):
        sampled = (100 + turn, 200 + turn)
        calls.append(build_call(turn, history, sampled, version=turn))
        history = (*history, *sampled, turn)
    rollout = Rollout(id="s", task_id="t", group_id="g", calls=tuple(calls))
    return RolloutResult(rollout=rollout, reconstruction=build_prefix_merged(rollout))


def test_everything_is_trained_where_nothing_is_in_the_way() -> None:
    rows, dropped = build_rows([(build_result(), 0.5)], max_tokens=100, oldest_version=0)
    (row,) = rows
    assert row.advantage == 0.5
    assert row.token_ids_T[row.trainable_T].tolist() == [100, 200, 101, 201, 102, 202, 103, 203]
    assert not dropped


def test_a_long_trajectory_is_truncated_after_the_last_call_that_fits() -> None:
    # calls end at 3, 6, 9 and 12 tokens
    for max_tokens, num_calls in ((12, 4), (11, 3), (9, 3), (8, 2), (3, 1)):
        (row,), dropped = build_rows([(build_result(), 1.0)], max_tokens=max_tokens, oldest_version=0)
        assert len(row.token_ids_T) == 3 * num_calls
        assert row.num_trainable == 2 * num_calls
        assert dropped["too_long"] == 2 * (4 - num_calls)


def test_a_trajectory_whose_first_call_does_not_fit_is_left_out_and_counted() -> None:
    rows, dropped = build_rows([(build_result(), 1.0)], max_tokens=2, oldest_version=0)
    assert rows == []
    assert dropped == {"too_long": 8}


def test_what_is_kept_has_the_context_that_it_was_sampled_in() -> None:
    result = build_result()
    (whole,) = result.reconstruction.trajectories
    part = truncate_trajectory(whole, result.rollout, 8)
    assert part is not None
    assert part.call_indices == (0, 1)
    assert part.token_ids == whole.token_ids[:6]
    assert part.logprobs == whole.logprobs[:6]
    assert truncate_trajectory(whole, result.rollout, 12) is whole


def test_stale_tokens_are_context_only() -> None:
    (row,), dropped = build_rows([(build_result(), 1.0)], max_tokens=100, oldest_version=2)
    assert row.token_ids_T[row.trainable_T].tolist() == [102, 202, 103, 203]
    assert len(row.token_ids_T) == 12
    assert dropped == {"stale": 4}


def test_a_row_of_stale_tokens_only_is_left_out() -> None:
    rows, dropped = build_rows([(build_result(), 1.0)], max_tokens=100, oldest_version=9)
    assert rows == []
    assert dropped == {"stale": 8}


def test_turns_that_are_not_chosen_are_context_and_counted() -> None:
    (row,), dropped = build_rows(
        [(build_result(), 1.0)], max_tokens=100, oldest_version=0, choose_turns=lambda result: {1, 3}
    )
    assert row.token_ids_T[row.trainable_T].tolist() == [101, 201, 103, 203]
    assert row.call_indices == (1, 3) and dropped == {"not_chosen": 4}
    # what is too long, not chosen and stale is counted once each
    (row,), dropped = build_rows(
        [(build_result(), 1.0)], max_tokens=9, oldest_version=1, choose_turns=lambda result: {0, 1, 3}
    )
    assert row.token_ids_T[row.trainable_T].tolist() == [101, 201]
    assert dropped == {"too_long": 2, "not_chosen": 2, "stale": 2}
    rows, dropped = build_rows(
        [(build_result(), 1.0)], max_tokens=100, oldest_version=0, choose_turns=lambda result: ()
    )
    assert rows == [] and dropped == {"not_chosen": 8}
