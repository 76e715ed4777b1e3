"""Trajectories -> one short text, equal exactly where they train the same. Never tells what differs."""

from collections.abc import Sequence
from hashlib import sha256

from polar_trl.types import Trajectory


def digest(trajectories: Sequence[Trajectory]) -> str:
    """SHA-256 (hex) over ids, masks and the exact logprobs, whatever the order of the trajectories.

    Stored when a session was trained, it proves at a later replay that the record still gives the same rows.
    """
    rows = sorted(_digest_one(trajectory) for trajectory in trajectories)
    return sha256(b"".join(rows)).hexdigest()


def _digest_one(trajectory: Trajectory) -> bytes:
    # The text form of an int or a float is exact, and the separators keep neighbouring fields apart.
    fields = (map(str, trajectory.token_ids), map(str, map(int, trajectory.trainable)), map(repr, trajectory.logprobs))
    return sha256("|".join(",".join(field) for field in fields).encode()).digest()
