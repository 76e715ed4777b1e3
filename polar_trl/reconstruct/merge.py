"""Merge a rollout's calls into trajectories by token prefix. A call that extends none of them starts a fork.

Cost: each call's ids are packed once into eight bytes per token, after which "begins with" is one comparison of
memory that stops at the first difference. A hundred calls of a hundred thousand tokens take less than half a second.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from struct import pack
from typing import Any, Literal

from polar_trl.types import Call, Rollout, TokenIds, Trajectory

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
    packed = _pack_calls(rollout.calls)
    drops = _find_drops(packed)
    chains: list[list[_PackedCall]] = []
    for this in packed:
        if not this.call.completion.token_ids or this.call.index in drops:
            continue
        prefixes = [
            chain
            for chain in chains
            if len(chain[-1].end) < len(this.prompt) and this.prompt.startswith(chain[-1].end)
        ]
        if prefixes:
            max(prefixes, key=lambda chain: (len(chain[-1].end), chain[-1].call.index)).append(this)
        else:
            chains.append([this])
    return _build_reconstruction(rollout, [[this.call for this in chain] for chain in chains], drops)


def build_per_request(rollout: Rollout) -> Reconstruction:
    """Build one trajectory per call, the baseline. Both builders drop the same calls and train the same tokens."""
    drops = _find_drops(_pack_calls(rollout.calls))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedCall:
    """A call with its ids as bytes."""

    call: Call
    prompt: bytes
    end: bytes
    """Prompt and sampled ids."""


def _pack_calls(calls: Sequence[Call]) -> list[_PackedCall]:
    packed = []
    for call in calls:
        prompt = _pack_ids(call.prompt_ids)
        packed.append(_PackedCall(call=call, prompt=prompt, end=prompt + _pack_ids(call.completion.token_ids)))
    return packed


def _pack_ids(ids: TokenIds) -> bytes:
    return array("q", ids).tobytes()


def _find_drops(packed: Sequence[_PackedCall]) -> dict[int, DropReason]:
    """Map each call whose samples are not trained to its drop reason. Calls without samples are not listed."""
    drops: dict[int, DropReason] = {}
    copies: defaultdict[bytes, list[_PackedCall]] = defaultdict(list)
    for this in packed:
        if this.call.purpose == "auxiliary":
            drops[this.call.index] = "auxiliary"
        elif this.call.completion.token_ids:
            copies[this.prompt].append(this)
    for siblings in copies.values():
        if len(siblings) > 1:
            continued = _find_continued(siblings, packed)
            keep = continued or {siblings[-1].call.index}
            drops |= {this.call.index: "superseded" for this in siblings if this.call.index not in keep}
    return drops


def _find_continued(siblings: Sequence[_PackedCall], packed: Sequence[_PackedCall]) -> set[int]:
    """Find the indices of the copies that a later call goes on from; that call may be an auxiliary or an empty one.

    Where copies sampled the same ids, it went on from the latest of them before it: a retry's answer is what reached
    the agent.
    """
    continued = set()
    for later in packed:
        before = [this for this in siblings if this.call.index < later.call.index]
        parents = [this for this in before if later.prompt.startswith(this.end)]
        if parents:
            longest = max(parents, key=lambda this: (len(this.end), this.call.index))
            continued.add(longest.call.index)
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
        token_ids=calls[-1].prompt_ids + calls[-1].completion.token_ids,
        trainable=tuple(trainable),
        logprobs=tuple(logprobs),
        policy_versions=tuple(policy_versions),
    )


def _digest_one(trajectory: Trajectory) -> bytes:
    # Fixed widths and a fixed byte order: exact for any id and float, the same on every machine.
    num_tokens = len(trajectory.token_ids)
    row = sha256(pack("<q", num_tokens))
    row.update(pack(f"<{num_tokens}q", *trajectory.token_ids))
    row.update(pack(f"<{num_tokens}?", *trajectory.trainable))
    row.update(pack(f"<{num_tokens}d", *trajectory.logprobs))
    return row.digest()
