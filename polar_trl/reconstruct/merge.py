"""Merge a rollout's calls into trajectories by token prefix. A call that extends none of them starts a fork.

Cost: a call that was recorded as the continuation of another holds that one's prompt itself, and only what it adds is
looked at. Of others, ids are packed into eight bytes each, and "begins with" is one comparison of memory.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import pack
from typing import Any, Literal

import numpy as np

from polar_trl.types import (
    Call,
    Rollout,
    SharedSequence,
    Trajectory,
    count_shared,
    pack_ids,
    share_ids,
)

DropReason = Literal["auxiliary", "superseded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconstruction:
    """A rollout's trajectories, and counts of the samples that are in none."""

    trajectories: tuple[Trajectory, ...]
    """In order of their first trained call."""
    dropped: Mapping[str, int]
    """Drop reason -> sampled tokens that no trajectory trains."""
    counters: Mapping[str, int]
    """"forks" (trajectories beyond the first), "superseded_calls", "auxiliary_calls"."""


def build_prefix_merged(rollout: Rollout) -> Reconstruction:
    """Build as few trajectories as the prefixes allow: see the package's docstring for the rule.

    Of two trajectories with the same ids (two identical copies that were both continued) the later one is extended.
    """
    drops = _find_drops(rollout.calls)
    chains: list[_Chain] = []
    for call in rollout.calls:
        if not call.completion.token_ids or call.index in drops:
            continue
        this = _Prompt(call)
        prefixes = [chain for chain in chains if chain.is_begun_by(this)]
        if prefixes:
            max(prefixes, key=lambda chain: (chain.length, chain.calls[-1].index)).append(call)
        else:
            chains.append(_Chain(call))
    return _build_reconstruction(rollout, [chain.calls for chain in chains], drops)


def build_per_request(rollout: Rollout) -> Reconstruction:
    """Build one trajectory per call, the baseline. Both builders drop the same calls and train the same tokens."""
    drops = _find_drops(rollout.calls)
    chains = [[call] for call in rollout.calls if call.completion.token_ids and call.index not in drops]
    return _build_reconstruction(rollout, chains, drops)


BUILDERS: Mapping[str, Callable[[Rollout], Reconstruction]] = {
    "prefix_merging": build_prefix_merged,
    "per_request": build_per_request,
}


def count_as_policy(rollout: Rollout) -> Rollout:
    """Return the rollout with its auxiliary calls taken for the policy's own (`train_auxiliary`)."""
    calls = tuple(replace(call, purpose="policy") if call.purpose == "auxiliary" else call for call in rollout.calls)
    return replace(rollout, calls=calls)


def count_calls(rollout: Rollout, reconstruction: Reconstruction) -> dict[str, Any]:
    """Count what a record's end holds, so that a list of sessions need not read their tokens (JSON values)."""
    return {
        "calls": len(rollout.calls),
        "sampled_tokens": sum(len(call.completion.token_ids) for call in rollout.calls),
        "trajectories": len(reconstruction.trajectories),
        "dropped": dict(reconstruction.dropped),
    }


def digest(trajectories: Sequence[Trajectory]) -> str:
    """Return SHA-256 (hex) over ids, masks and the exact logprobs, whatever the order of the trajectories.

    Stored when a session was trained, it proves at a later replay that the record still gives the same rows.
    """
    rows = sorted(_digest_one(trajectory) for trajectory in trajectories)
    return sha256(b"".join(rows)).hexdigest()


class _Prompt:
    """A call's prompt, packed if it comes to that."""

    def __init__(self, call: Call) -> None:
        self.ids = call.prompt_ids
        self._packed: bytes | None = None

    def pack(self) -> bytes:
        if self._packed is None:
            self._packed = pack_ids(self.ids)
        return self._packed


class _Chain:
    """Calls of which each goes on from the one before."""

    def __init__(self, call: Call) -> None:
        self.calls = [call]
        self._packed: bytes | None = None

    @property
    def length(self) -> int:
        return _count_ids(self.calls[-1])

    def append(self, call: Call) -> None:
        self.calls.append(call)
        self._packed = None

    def is_begun_by(self, prompt: _Prompt) -> bool:
        """Tell whether the prompt goes on from here."""
        last = self.calls[-1]
        if self.length >= len(prompt.ids):
            return False
        if count_shared(prompt.ids, last.prompt_ids) == len(last.prompt_ids):
            return prompt.ids[len(last.prompt_ids) : self.length] == last.completion.token_ids
        if self._packed is None:
            self._packed = pack_ids(last.prompt_ids) + pack_ids(last.completion.token_ids)
        return prompt.pack().startswith(self._packed)


def _count_ids(call: Call) -> int:
    return len(call.prompt_ids) + len(call.completion.token_ids)


def _find_drops(calls: Sequence[Call]) -> dict[int, DropReason]:
    """Map each call whose samples are not trained to its drop reason. Calls without samples are not listed."""
    drops: dict[int, DropReason] = {call.index: "auxiliary" for call in calls if call.purpose == "auxiliary"}
    by_length: defaultdict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.index not in drops and call.completion.token_ids:
            by_length[len(call.prompt_ids)].append(call)
    for candidates in by_length.values():
        copies: defaultdict[bytes, list[Call]] = defaultdict(list)
        for call in candidates if len(candidates) > 1 else ():
            copies[pack_ids(call.prompt_ids)].append(call)
        for siblings in copies.values():
            if len(siblings) > 1:
                keep = _find_continued(siblings, calls) or {siblings[-1].index}
                drops |= {call.index: "superseded" for call in siblings if call.index not in keep}
    return drops


def _find_continued(siblings: Sequence[Call], calls: Sequence[Call]) -> set[int]:
    """Find the indices of the copies that a later call goes on from; that call may be an auxiliary or an empty one.

    Where copies sampled the same ids, it went on from the latest of them before it: a retry's answer is what reached
    the agent.
    """
    continued = set()
    for later in calls:
        parents = [call for call in siblings if call.index < later.index and later.goes_on_from(call)]
        if parents:
            longest = max(parents, key=lambda call: (len(call.completion.token_ids), call.index))
            continued.add(longest.index)
    return continued


def _build_reconstruction(
    rollout: Rollout, chains: Sequence[Sequence[Call]], drops: Mapping[int, DropReason]
) -> Reconstruction:
    dropped: Counter[str] = Counter()
    counts = Counter(drops.values())
    for call in rollout.calls:
        if call.index in drops:
            dropped[drops[call.index]] += len(call.completion.token_ids)
    return Reconstruction(
        trajectories=tuple(_build_trajectory(rollout.id, chain) for chain in chains),
        dropped=dict(dropped),
        counters={
            "forks": max(0, len(chains) - 1),
            "superseded_calls": counts["superseded"],
            "auxiliary_calls": counts["auxiliary"],
        },
    )


def _build_trajectory(rollout_id: str, calls: Sequence[Call]) -> Trajectory:
    """Build the last call's prompt and samples, in which every call's samples are trainable.

    A token's policy version is that of its call's first token, the oldest that can have sampled it.
    """
    last = calls[-1]
    prompt_ids = last.prompt_ids if isinstance(last.prompt_ids, SharedSequence) else share_ids(last.prompt_ids)
    trainable: list[bool] = []
    logprobs: list[float] = []
    policy_versions: list[int] = []
    for call in calls:
        num_context, num_sampled = len(call.prompt_ids) - len(trainable), len(call.completion.token_ids)
        trainable += [False] * num_context + [True] * num_sampled
        logprobs += [0.0] * num_context + list(call.completion.logprobs)
        policy_versions += [-1] * num_context + [call.completion.first_policy_version] * num_sampled
    return Trajectory(
        rollout_id=rollout_id,
        call_indices=tuple(call.index for call in calls),
        token_ids=SharedSequence(array("q", last.completion.token_ids), prompt_ids),
        trainable=tuple(trainable),
        logprobs=tuple(logprobs),
        policy_versions=tuple(policy_versions),
    )


def _digest_one(trajectory: Trajectory) -> bytes:
    # Fixed widths and a fixed byte order: exact for any id and float, the same on every machine.
    num_tokens = len(trajectory.token_ids)
    row = sha256(pack("<q", num_tokens))
    row.update(np.frombuffer(pack_ids(trajectory.token_ids), dtype="=i8").astype("<i8").tobytes())
    row.update(bytes(trajectory.trainable))
    row.update(np.array(trajectory.logprobs, dtype="<f8").tobytes())
    return row.digest()
