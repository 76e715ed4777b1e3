"""Recorded sessions give the trajectories, counts and drops that expected.json pins: see recordings/README.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import BUILDERS, digest
from polar_trl.recording.log import read_record

FOLDER = Path(__file__).parent / "recordings"
RECORDS = sorted(FOLDER.glob("*.jsonl"))


def describe_session(path: Path) -> dict[str, Any]:
    """Count and digest what a record is rebuilt to, with each builder. Raises `LawError`."""
    record = read_record(path)
    calls = record.rollout.calls
    figures: dict[str, Any] = {
        "calls": len(calls),
        "sampled_tokens": sum(len(call.completion.token_ids) for call in calls),
    }
    for builder in ("prefix_merging", "per_request"):
        rebuilt = BUILDERS[builder](record.rollout)
        check_laws(record.rollout, rebuilt)
        figures[builder] = {
            "digest": digest(rebuilt.trajectories),
            "trajectories": [list(trajectory.call_indices) for trajectory in rebuilt.trajectories],
            "trainable_tokens": sum(sum(trajectory.trainable) for trajectory in rebuilt.trajectories),
            "dropped": dict(rebuilt.dropped),
            "counters": dict(rebuilt.counters),
        }
    return figures


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_gives_the_same_trajectories(path: Path) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())["sessions"]
    figures = describe_session(path)
    assert figures == expected[path.stem]
    # what the run itself wrote when the session ended
    stored = read_record(path).extra.get("trajectory_digest", figures["prefix_merging"]["digest"])
    assert stored == figures["prefix_merging"]["digest"]


def test_every_record_is_pinned() -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    assert [path.stem for path in RECORDS] == sorted(expected["sessions"]) == sorted(expected["rows"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_another_sampled_token_gives_another_digest(path: Path, tmp_path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    sampling = [index for index, line in enumerate(lines) if line.endswith(b"\n") and b'"token_ids":[]' not in line]
    last = max(index for index in sampling if b'"type":"call"' in lines[index])
    call = json.loads(lines[last])
    call["completion"]["token_ids"][0] += 1
    lines[last] = json.dumps(call).encode() + b"\n"
    changed = tmp_path / path.name
    changed.write_bytes(b"".join(lines))
    figures, others = describe_session(path), describe_session(changed)
    for builder in ("prefix_merging", "per_request"):
        assert figures[builder]["digest"] != others[builder]["digest"]
