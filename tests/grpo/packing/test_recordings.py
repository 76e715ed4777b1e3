"""Recorded sessions give the training rows, packed batches and plans that expected.json pins.

The records are those of tests/reconstruct/recordings; digests are SHA-256 over types, shapes and bytes of arrays.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from polar_trl.grpo.packing.balance import CostModel, plan_micro_batches
from polar_trl.grpo.packing.batch import build_micro_batch
from polar_trl.grpo.rows import Row, build_rows, rollout_tokens, token_shares
from polar_trl.reconstruct.merge import BUILDERS
from polar_trl.recording.log import read_record

FOLDER = Path(__file__).parents[2] / "reconstruct" / "recordings"
RECORDS = sorted(FOLDER.glob("*.jsonl"))
MAX_TOKENS = 1100
"""Of a row: a few trajectories of one record are longer."""
OLDEST_VERSION = 1
"""Tokens that policy version 0 sampled are stale."""
MICRO_BATCH_TOKENS = 2000
COST = CostModel(per_token=2.0e8, per_pair=7.0e4)
TENSORS = ("completion_ids", "completion_mask", "sampling_per_token_logps", "advantages", "shares", "rollout_tokens")
PACKED_TENSORS = ("input_ids", "position_ids", "scored_positions", "labels", "row_of_S")


def build_recorded_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows of one record, and its sampled tokens that are not trained; the advantage is a function of its name."""
    rollout = read_record(path).rollout
    result = SimpleNamespace(rollout=rollout, reconstruction=BUILDERS["prefix_merging"](rollout), record_path=path)
    advantage = (crc32(path.stem.encode()) % 7 - 3) / 4
    rows, dropped = build_rows(
        [(result, advantage)],
        max_tokens=MAX_TOKENS,
        oldest_version=OLDEST_VERSION,
        name_record=lambda path: path.stem,
    )
    return rows, dict(dropped)


def describe_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Digest rows, and the micro-batch of all of them in both layouts."""
    arrays = [(row.token_ids_T, row.trainable_T, row.logprobs_T, row.policy_versions_T) for row in rows]
    named = [
        [row.rollout_id, row.advantage, list(row.call_indices), row.record_path, row.num_trainable] for row in rows
    ]
    return {
        "rows": len(rows),
        "tokens": sum(len(row.token_ids_T) for row in rows),
        "rows_digest": digest([named, *(array for of_row in arrays for array in of_row)]),
        "tree_digest": digest_batch(rows, "tree"),
        "packed_digest": digest_batch(rows, "packed"),
    }


def digest_batch(rows: Sequence[Row], kind: Any) -> str:
    shares = [
        token_shares(rows, loss_type=loss_type, max_completion_length=512)
        for loss_type in ("dapo", "grpo", "dr_grpo", "luspo")
    ]
    batch = build_micro_batch(rows, shares[0], rollout_tokens(rows), kind=kind, device=torch.device("cpu"))
    packed = batch["packed"]
    layout = packed.layout
    segments = [[segment.start, segment.end, segment.parent, segment.depth] for segment in layout.segments]
    return digest(
        [
            shares,
            *(batch[name].numpy() for name in TENSORS),
            *(getattr(packed, name).numpy() for name in PACKED_TENSORS),
            *(layout.token_ids_L, layout.position_ids_L, layout.subtree_ends_L),
            segments,
            [list(chain) for chain in layout.chains],
        ]
    )


def digest(parts: Iterable[Any]) -> str:
    """SHA-256 over arrays, and over JSON of what is none."""
    total = sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(f"{part.dtype.str}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        else:
            total.update(json.dumps(part).encode())
    return total.hexdigest()


def plan(rows: Sequence[Row], *, share_prefixes: bool) -> dict[str, Any]:
    """Micro-batches of two ranks, as indices of rows."""
    planned = plan_micro_batches(
        [row.token_ids_T for row in rows],
        num_ranks=2,
        max_tokens=MICRO_BATCH_TOKENS,
        share_prefixes=share_prefixes,
        cost=COST,
    )
    return {
        "micro_batches": [[list(batch) for batch in of_rank] for of_rank in planned.micro_batches],
        "forwarded_tokens": planned.forwarded_tokens,
        "unique_tokens": planned.unique_tokens,
    }


def describe_record(path: Path) -> dict[str, Any]:
    rows, dropped = build_recorded_rows(path)
    return {**describe_rows(rows), "dropped": dropped}


def describe_all(paths: Sequence[Path]) -> dict[str, Any]:
    rows = [row for path in paths for row in build_recorded_rows(path)[0]]
    return {
        **describe_rows(rows),
        "tree_plan": plan(rows, share_prefixes=True),
        "packed_plan": plan(rows, share_prefixes=False),
    }


def read_expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
    return found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_gives_the_same_rows(path: Path) -> None:
    assert describe_record(path) == read_expected()["rows"][path.stem]


def test_all_records_give_the_same_batch_and_plan() -> None:
    assert describe_all(RECORDS) == read_expected()["all_rows"]


def test_rows_are_cut_and_stale_somewhere() -> None:
    dropped = [rows["dropped"] for rows in read_expected()["rows"].values()]
    assert any("too_long" in reasons for reasons in dropped) and any("stale" in reasons for reasons in dropped)


def test_another_token_gives_other_digests() -> None:
    rows, _ = build_recorded_rows(RECORDS[0])
    before = describe_rows(rows)
    rows[0].token_ids_T[-1] += 1
    after = describe_rows(rows)
    assert [name for name in before if before[name] != after[name]] == [
        "rows_digest",
        "tree_digest",
        "packed_digest",
    ]
