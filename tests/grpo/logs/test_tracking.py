"""Trackers hold a run, read back from their own files: curves by step, and a table of rollouts per step."""

import json
import math
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import run_worker
from records import read_session
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState
from wandb.proto.wandb_internal_pb2 import Record

from polar_trl.grpo.logs.completions_table import (
    MAX_COMPLETION_CHARS,
    CompletionsTable,
    _level,
    _level_column,
    shorten,
)
from polar_trl.reconstruct import Reconstruction
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.run_folder import read_log
from polar_trl.types import Rollout

COLUMNS = [
    "step", "rollout", "task", "prompt", "completion", "rewards/grader", "rewards/brevity", "reward", "advantage",
    "calls", "sampled_tokens", "stop_reason", "error", "record", "distinct",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two tasks and an evaluation, on two ranks, under all three trackers at once."""
    out = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(out))
        patch.setenv("TRACKIO_DIR", str(out / "trackio"))
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(out / "tensorboard"))
        run_worker("tracking_worker.py", str(tiny_model), str(out), processes=2, warm=False)
    return out


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run / "completions" / f"{name}.parquet").to_pylist()
    return rows


def curve(run: Path, key: str) -> list[tuple[int, float]]:
    """Step and value, by our own log."""
    return [(line["step"], line[key]) for line in read_log(run) if key in line]


def test_a_table_per_step_holds_that_steps_rollouts(run: Path) -> None:
    files = sorted(path.name for path in (run / "completions").iterdir())
    assert files == ["completions_00001.parquet", "completions_00002.parquet", "eval_00002.parquet"]
    for name, step, size, batch in (
        ("completions_00001", 1, 8, "train-00000"),
        ("completions_00002", 2, 8, "train-00001"),
        ("eval_00002", 2, 4, "eval-00002"),
    ):
        rows = rows_of(run, name)
        assert list(rows[0]) == COLUMNS
        assert len({row["rollout"] for row in rows}) == len(rows) == size  # of both ranks, each once
        assert all(row["step"] == step and row["rollout"].startswith(batch) for row in rows)
        for row in rows:
            session = read_session(run / row["record"])
            assert (session.id, session.task_id, len(session.calls)) == (row["rollout"], row["task"], row["calls"])
            assert row["rewards/grader"] == (None if session.reward is None else pytest.approx(session.reward))
            assert row["error"] == (session.error or "")
            assert session.calls[-1].message.text.strip() in row["completion"]
            assert row["prompt"] == f"[user]\n{session.calls[0].request.messages[0].text}"


def test_rewards_and_advantages_are_those_of_the_step(run: Path) -> None:
    for step in (1, 2):
        rows = rows_of(run, f"completions_{step:05d}")
        failed = [row for row in rows if "grader_raises" in row["task"]]
        graded = [row for row in rows if row not in failed]
        assert len(failed) == len(graded) == 4
        assert all(row["reward"] is None and "broken on purpose" in row["error"] for row in failed)
        assert all(row["rewards/brevity"] == pytest.approx(-row["distinct"] / 100) for row in graded)
        rewards = [row["reward"] for row in graded]
        assert rewards == pytest.approx([row["rewards/grader"] + row["rewards/brevity"] for row in graded], abs=1e-6)
        assert dict(curve(run, "reward"))[step] == pytest.approx(sum(rewards) / 4, abs=1e-6)
        assert sum(row["advantage"] for row in graded) == pytest.approx(0, abs=1e-4)
        best = max(graded, key=lambda row: row["reward"])
        assert best["advantage"] == max(row["advantage"] for row in rows)


def test_tensorboard_has_the_curves_and_a_few_rollouts_as_text(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [
        (step, pytest.approx(value)) for step, value in curve(run, "reward")
    ]
    assert [(e.step, e.value) for e in events.Scalars("eval/reward")] == [
        (step, pytest.approx(value)) for step, value in curve(run, "eval_reward")
    ]
    texts = [tag for tag in events.Tags()["tensors"] if "completions" in tag]
    assert texts == [f"{key}/{i}/text_summary" for key in ("completions", "eval/completions") for i in range(4)]
    rows = rows_of(run, "completions_00002")
    best = sorted(rows, key=lambda row: -9 if row["reward"] is None else row["reward"])[-1]  # of equals the last
    last = events.Tensors("completions/3/text_summary")
    assert [event.step for event in last] == [1, 2]
    text = last[-1].tensor_proto.string_val[0].decode()
    assert best["rollout"] in text and best["record"] in text
    assert all(f"    {line}" in text for line in best["completion"].splitlines())


def read_wandb(run: Path) -> list[dict[str, Any]]:
    """The history of an offline run; its file is one of LevelDB's logs: blocks of 32 KiB, records in parts."""
    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    data, position, parts = path.read_bytes(), 7, b""
    history = []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return history


def test_wandb_has_the_curves_and_the_tables(run: Path) -> None:
    history = read_wandb(run)
    for key in ("train/reward", "eval/reward"):
        found = [(line["train/global_step"], line[key]) for line in history if key in line]
        assert found == curve(run, key.removeprefix("train/").replace("eval/", "eval_"))
    files = sorted(path for path in (run / "wandb").glob("offline-run-*/files/media/table/**/*.table.json"))
    tables = {path.parent.name: [] for path in files}
    for path in files:
        tables[path.parent.name].append(json.loads(path.read_text()))
    assert {name: len(found) for name, found in tables.items()} == {"table": 2, "eval": 1}
    for table in (*tables["table"], *tables["eval"]):
        assert table["columns"] == COLUMNS
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in table["data"]]
        step = rows[0]["step"]
        assert rows == rows_of(run, f"{'eval' if table in tables['eval'] else 'completions'}_{step:05d}")
    # a table stands at its step on the axis of the curves
    steps = [line["train/global_step"] for line in history if any("completions/sha256" in key for key in line)]
    assert steps == [1, 2, 2]


def test_trackio_has_the_curves_and_the_tables_at_the_same_steps(run: Path) -> None:
    with sqlite3.connect(run / "trackio" / "polar.db") as database:
        lines = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    assert [(step, line["train/reward"]) for step, line in lines if "train/reward" in line] == curve(run, "reward")
    tables = [(step, key, line[key]["_value"]) for step, line in lines for key in line if key.endswith("completions")]
    assert [(step, key) for step, key, _ in tables] == [
        (1, "completions"),
        (2, "completions"),
        (2, "eval/completions"),
    ]
    for step, key, rows in tables:
        assert rows == rows_of(run, f"{'eval' if key.startswith('eval') else 'completions'}_{step:05d}")


# Without a run.


def finish(folder: Path, name: str) -> RolloutResult:
    rollout = Rollout(id=name, task_id="t", group_id="g", reward=0.5)
    reconstruction = Reconstruction(trajectories=(), dropped={}, counters={})
    return RolloutResult(
        rollout=rollout, reconstruction=reconstruction, record_path=folder / "sessions" / f"{name}.jsonl"
    )


def build_table(folder: Path, **settings: Any) -> CompletionsTable:
    return CompletionsTable(folder, lambda path: path.relative_to(folder).as_posix() if path else "", list, **settings)


def log(table: CompletionsTable, step: int, **logs: float) -> None:
    table.on_log(None, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl(), logs=logs)


def test_a_long_session_is_shortened_in_the_middle_and_says_where_it_is_whole(tmp_path: Path) -> None:
    table, result = build_table(tmp_path), finish(tmp_path, "r0")
    call = {"type": "function", "id": "1", "function": {"name": "run", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "assistant", "content": "first words", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "x" * 400_000, "tool_call_id": "1"},
        {"role": "assistant", "content": "last words"},
    ]
    table.note(["do it"], [result], [messages], {})
    table.add("train", 1, [result], {"rewards/grader": [0.5]}, [0.5], [0.0])
    log(table, 1, loss=0.0)
    (row,) = rows_of(tmp_path, "completions_00001")
    assert MAX_COMPLETION_CHARS < len(row["completion"]) < MAX_COMPLETION_CHARS + 200
    opening = '[assistant, reasoning]\nhm\n\n[assistant]\nfirst words\n\n[call run]\n{"x": 1}\n\n[tool]\nxx'
    assert row["completion"].startswith(opening)
    assert row["completion"].endswith("[assistant]\nlast words")
    assert "characters left out; the whole session: sessions/r0.jsonl ...]" in row["completion"]


def test_a_shortened_text_counts_what_it_leaves_out() -> None:
    assert shorten("abcdef", 6, "x") == "abcdef"
    assert shorten("abcdefg", 4, "") == "ab\n\n[... 3 characters left out ...]\n\nfg"


def test_what_was_resampled_is_in_no_table_and_a_step_is_written_once(tmp_path: Path) -> None:
    table = build_table(tmp_path)
    first, other, spare = (finish(tmp_path, name) for name in ("first", "other", "spare"))
    table.note(["a", "b"], [first, other], [[], []], {"extra": ["x", {"y": 1}]})
    table.note(["c"], [spare], [[]], {"extra": [1, 2]})  # columns that fit no rollout are left out
    table.add("train", 3, [first, spare], {"rewards/grader": [0.5, float("nan")]}, [0.5, float("nan")], [1.0, 0.0])
    log(table, 3, loss=0.0)
    rows = rows_of(tmp_path, "completions_00003")
    assert [(row["rollout"], row["prompt"], row["reward"], row["extra"]) for row in rows] == [
        ("first", "a", 0.5, "x"),
        ("spare", "c", None, None),
    ]
    (tmp_path / "completions" / "completions_00003.parquet").unlink()
    log(table, 3, train_runtime=1.0)
    assert list((tmp_path / "completions").iterdir()) == []


def test_evaluation_waits_for_its_own_log(tmp_path: Path) -> None:
    table, trained, evaluated = build_table(tmp_path), finish(tmp_path, "t"), finish(tmp_path, "e")
    for mode, result in (("train", trained), ("eval", evaluated)):
        table.note(["a"], [result], [[]], {})
        table.add(mode, 1, [result], {}, [0.5], [0.0])
    log(table, 1, loss=0.0)
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["completions_00001.parquet"]
    log(table, 1, eval_reward=0.5)
    assert [row["rollout"] for row in rows_of(tmp_path, "eval_00001")] == ["e"]


def test_what_is_printed_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = build_table(tmp_path, num_printed=2)
    results = [finish(tmp_path, f"r{i}") for i in range(5)]
    table.note(["a"] * 5, results, [[{"role": "assistant", "content": f"reply{i} " * 2000}] for i in range(5)], {})
    table.add("train", 1, results, {}, [0.1, 0.9, 0.2, 0.3, 0.4], [0.0] * 5)
    log(table, 1, loss=0.0)
    shown = capsys.readouterr().out
    assert "reply0" in shown and "reply1" in shown  # the worst and the best
    assert "reply2" not in shown and len(shown) < 60_000


def test_a_column_of_the_table_is_of_one_kind(tmp_path: Path) -> None:
    values = [1, 2.5, True, "a", None, 2**70, "half \ud83d", [1]]
    assert _level_column([1, 2.5, None]) == [1, 2.5, None]
    assert _level_column([True, None]) == [True, None]
    odd = [math.nan, math.inf, np.float64(0.5)]
    assert _level_column(odd) is odd
    assert _level_column(values) == ["1", "2.5", "True", "a", None, str(2**70), "half ?", "[1]"]
    rows = _level([{"step": 1, "extra": value} for value in values] + [{"step": 2}])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet")["step"].to_pylist() == [1] * len(values) + [2]
