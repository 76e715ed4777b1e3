"""Check a rollout's trajectories against its calls; a `LawError` names the rollout and shows both sides.

An independent check: it compares with the recorded calls, shares no code with the builders, and repairs nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from polar_trl.errors import LawError
from polar_trl.reconstruct.merge import Reconstruction
from polar_trl.types import Call, Rollout, Trajectory, begins_with


def check_laws(rollout: Rollout, reconstruction: Reconstruction) -> None:
    """Check alignment, fidelity and coverage, in that order. Raises `LawError` at the first that is broken.

    For what a builder made, before anything is truncated.
    """
    if texts := [call.index for call in rollout.calls if call.text_only]:
        raise LawError(
            f"rollout {rollout.id}: calls {texts} came as text without token ids; nothing of it can be trained"
        )
    _check_logprobs(rollout)
    indices = [call.index for call in rollout.calls]
    if indices != list(range(len(indices))):
        raise LawError(f"rollout {rollout.id}: its calls have indices {indices}, expected 0 to {len(indices) - 1}")
    for position, trajectory in enumerate(reconstruction.trajectories):
        where = f"rollout {rollout.id}, trajectory {position}"
        if trajectory.rollout_id != rollout.id:
            raise LawError(f"{where}: belongs to rollout {trajectory.rollout_id}")
        _check_alignment(where, trajectory)
        _check_fidelity(where, trajectory, rollout.calls)
    _check_coverage(rollout, reconstruction)


def _check_logprobs(rollout: Rollout) -> None:
    """Check the logprobs of all samples, trained or not; fidelity shows later that trajectories have the same."""
    for call in rollout.calls:
        for position, logprob in enumerate(call.completion.logprobs):
            if not -math.inf < logprob <= 0.0:
                raise LawError(
                    f"rollout {rollout.id}, call {call.index}: sampled token {position} has log-probability "
                    f"{logprob}; it must be a finite number, at most 0"
                )


def _check_alignment(where: str, trajectory: Trajectory) -> None:
    lengths = {
        name: len(getattr(trajectory, name)) for name in ("token_ids", "trainable", "logprobs", "policy_versions")
    }
    if len(set(lengths.values())) != 1:
        raise LawError(f"{where}: fields of different lengths, {lengths}")


def _check_fidelity(where: str, trajectory: Trajectory, calls: Sequence[Call]) -> None:
    """Check each span against its call; between spans and outside of them nothing may be trained."""
    token_ids, end = tuple(trajectory.token_ids), 0
    checked: Sequence[int] = ()  # the prompt of the call before, with which a long session's next one begins
    for index in trajectory.call_indices:
        if not 0 <= index < len(calls):
            raise LawError(f"{where}: trains call {index}, but the rollout has calls 0 to {len(calls) - 1}")
        call, at = calls[index], f"{where}, call {index}"
        start, previous_end = len(call.prompt_ids), end
        end = start + len(call.completion.token_ids)
        if start < previous_end or end == start:
            raise LawError(
                f"{at}: its span {start} to {end} is empty, or begins before the previous ended at {previous_end}"
            )
        known = len(checked) if begins_with(call.prompt_ids, checked) else 0
        if token_ids[known:start] != call.prompt_ids[known:]:
            _compare(f"{at}: prompt ids", token_ids[:start], tuple(call.prompt_ids))
        _compare(f"{at}: sampled ids", token_ids[start:end], call.completion.token_ids)
        checked = call.prompt_ids
        _compare(f"{at}: logprobs", trajectory.logprobs[start:end], call.completion.logprobs)
        _check_span_mask(at, trajectory, call, start, end)
        _check_untrained(f"{at}: before its span", trajectory, previous_end, start)
    if end == 0 or end != len(token_ids):
        raise LawError(f"{where}: {len(token_ids)} tokens, but its last call ends at {end}")


def _check_span_mask(at: str, trajectory: Trajectory, call: Call, start: int, end: int) -> None:
    mask = trajectory.trainable[start:end]
    if not all(mask):
        raise LawError(f"{at}: {sum(mask)} trainable tokens, {end - start} sampled ones")
    versions = trajectory.policy_versions[start:end]
    first, last = call.completion.first_policy_version, call.completion.last_policy_version
    if min(versions) < first or max(versions) > last:
        raise LawError(f"{at}: policy versions {min(versions)} to {max(versions)}, sampled under {first} to {last}")


def _check_untrained(what: str, trajectory: Trajectory, start: int, end: int) -> None:
    length = end - start
    _compare(f"{what}: trainable", trajectory.trainable[start:end], (False,) * length)
    _compare(f"{what}: logprobs", trajectory.logprobs[start:end], (0.0,) * length)
    _compare(f"{what}: policy versions", trajectory.policy_versions[start:end], (-1,) * length)


def _compare(what: str, ours: Sequence[object], theirs: Sequence[object]) -> None:
    """Compare the trajectory's values with the recorded ones; show the neighbourhood of the first difference."""
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    position = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(ours), len(theirs)))
    near = slice(max(0, position - 2), position + 3)
    raise LawError(
        f"{what} differ from position {position}: {list(ours[near])} in the trajectory (length {len(ours)}), "
        f"{list(theirs[near])} expected (length {len(theirs)})"
    )


def _check_coverage(rollout: Rollout, reconstruction: Reconstruction) -> None:
    """Check that whole calls are trained or dropped, by counting calls: fidelity has shown that spans are whole."""
    where = f"rollout {rollout.id}"
    trained = [index for trajectory in reconstruction.trajectories for index in trajectory.call_indices]
    twice = sorted(index for index, times in Counter(trained).items() if times > 1)
    if twice:
        raise LawError(f"{where}: calls {twice} are trained in more than one place")
    num_sampled = sum(len(call.completion.token_ids) for call in rollout.calls)
    num_trained = sum(sum(trajectory.trainable) for trajectory in reconstruction.trajectories)
    num_dropped = sum(reconstruction.dropped.values())
    if num_sampled != num_trained + num_dropped:
        raise LawError(
            f"{where}: {num_sampled} tokens were sampled, but {num_trained} trained "
            f"+ {num_dropped} dropped {dict(reconstruction.dropped)} = {num_trained + num_dropped}"
        )
    _check_drop_reasons(where, rollout.calls, frozenset(trained), reconstruction)


def _check_drop_reasons(
    where: str, calls: Sequence[Call], trained: frozenset[int], reconstruction: Reconstruction
) -> None:
    """Check the drop reasons: "auxiliary" calls are never trained, "superseded" ones have a trained twin."""
    auxiliary = {call.index for call in calls if call.purpose == "auxiliary"}
    if auxiliary & trained:
        raise LawError(f"{where}: auxiliary calls {sorted(auxiliary & trained)} are trained")
    prompts: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
    for index in trained:
        prompts[len(calls[index].prompt_ids)].append(calls[index].prompt_ids)
    claimed = {
        "auxiliary": sum(len(calls[index].completion.token_ids) for index in auxiliary),
        "superseded": sum(
            len(call.completion.token_ids)
            for call in calls
            if call.index not in auxiliary | trained and call.prompt_ids in prompts.get(len(call.prompt_ids), ())
        ),
    }
    for reason, num_tokens in claimed.items():
        if reconstruction.dropped.get(reason, 0) != num_tokens:
            raise LawError(
                f"{where}: {reconstruction.dropped.get(reason, 0)} tokens dropped as {reason}, "
                f"but the record has {num_tokens}"
            )
