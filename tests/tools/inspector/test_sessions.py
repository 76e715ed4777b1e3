"""The index of sessions: what it says of finished, running, cut and broken ones, and what it does not read again."""

import cProfile
import json
import os
import pstats
import subprocess
from pathlib import Path
from typing import Any

import pytest
from recorded import ATTEMPT, build_call, describe_rollout, name_record, write_rows, write_session
from sessions import run_session

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import RecordError
from polar_trl.harness.shell import ShellHarness
from polar_trl.recording.log import SessionLog
from polar_trl.sandbox.owner import build_owner_tag
from polar_trl.tools.doctor import RENDERER
from polar_trl.tools.inspector import sessions
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.tools.inspector.sessions import Entry, SessionIndex
from polar_trl.tools.inspector.table import build_table_rows, count_choices, name_stage, parse_reward, select
from polar_trl.tools.inspector.trained_rows import TrainedRowIndex
from polar_trl.types import Call, Message

CALLS = (((1,), (10, 11)), ((1, 10, 11, 2), (12,)), ((7,), (20, 21, 22)))


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.0)


def build_calls(name: str) -> list[Call]:
    return [build_call(name, index, prompt, sampled) for index, (prompt, sampled) in enumerate(CALLS)]


def look(run: Path) -> dict[str, Entry]:
    return {entry.rollout: entry for entry in SessionIndex(run / "sessions").refresh()}


def test_a_finished_session_is_known_from_its_two_ends(tmp_path: Path) -> None:
    path = write_session(tmp_path, "train-00000-g000-r000", build_calls("train-00000-g000-r000"), task_id="t1")
    lines = path.read_bytes().splitlines(keepends=True)
    # what lies between is not even looked at: it may be anything
    path.write_bytes(lines[0] + b"{not json\n" * 40000 + lines[-1])
    entry = look(tmp_path)["train-00000-g000-r000"]
    assert (entry.finished, entry.counted, entry.problem) == (True, True, None)
    assert (entry.num_calls, entry.sampled_tokens, entry.trajectories, entry.task) == (3, 6, 2, "t1")
    assert (entry.reward, entry.stop_reason, entry.batch, entry.attempt) == (1.0, "completed", "train_00000", ATTEMPT)


def test_a_record_without_a_summary_is_counted_afterwards(tmp_path: Path) -> None:
    write_session(tmp_path, "a", build_calls("a"), summary=False)
    index = SessionIndex(tmp_path / "sessions")
    (entry,) = index.refresh()
    version = index.version
    assert (entry.finished, entry.counted, entry.trajectories) == (True, False, None)
    assert index.count_next()
    assert (entry.num_calls, entry.sampled_tokens, entry.trajectories, entry.dropped) == (3, 6, 2, {})
    assert index.version > version
    assert not index.count_next()


def test_a_session_is_cut_off_once_its_process_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            owner = build_owner_tag(process.pid)
            write_session(tmp_path, "a", build_calls("a"), finish=False, owner=owner)
            write_session(tmp_path, "b", build_calls("b"), finish=False, owner="another machine:x:1:2:3")
            (gone, elsewhere) = SessionIndex(tmp_path / "sessions").refresh()
            long_after_s = gone.changed_s + 10 * sessions.QUIET_S
            assert name_stage(gone, long_after_s) == "running", "it may think for an hour"
            assert name_stage(elsewhere, long_after_s) == "cut off"
            assert RunFolder(tmp_path).is_live()
        finally:
            process.kill()
    assert (name_stage(gone, gone.changed_s), name_stage(elsewhere, gone.changed_s)) == ("cut off", "running")
    (tmp_path / "sessions" / elsewhere.key).with_suffix(".jsonl").unlink()
    assert not RunFolder(tmp_path).is_live()


def test_a_session_is_followed_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "sessions" / ATTEMPT / "train_00000" / "a.jsonl"
    log = SessionLog(session_id="a", task_id="task", group_id="a", path=path)
    index = SessionIndex(tmp_path / "sessions")
    (entry,) = index.refresh()
    now_s = os.stat(path).st_mtime
    assert (entry.num_calls, name_stage(entry, now_s)) == (0, "preparing")
    calls = build_calls("a")
    log.append(calls[0])
    index.refresh()
    assert (entry.num_calls, entry.sampled_tokens, name_stage(entry, now_s)) == (1, 2, "running")
    read = entry.offset
    with path.open("ab") as file:
        file.write(b'{"type":"call","index":1,"torn')
    index.refresh()
    assert (entry.num_calls, entry.offset, entry.problem) == (1, read, None), "half a line is left for the next look"
    assert name_stage(entry, now_s + 2 * sessions.QUIET_S) == "cut off"
    whole = write_session(tmp_path / "other", "a", calls).read_bytes()
    path.write_bytes(path.read_bytes()[:read] + whole[read:])
    index.refresh()
    assert (entry.finished, name_stage(entry, now_s)) == (True, "done")
    assert (entry.num_calls, entry.trajectories) == (3, 2)


def test_new_folders_and_files_are_found_and_others_left_alone(tmp_path: Path) -> None:
    write_session(tmp_path, "a", build_calls("a"))
    index = SessionIndex(tmp_path / "sessions")
    assert [entry.rollout for entry in index.refresh()] == ["a"]
    version = index.version
    index.refresh()
    assert index.version == version, "nothing changed"
    write_session(tmp_path, "b", build_calls("b"))
    write_session(tmp_path, "c", build_calls("c"), batch="train_00001")
    assert sorted(entry.rollout for entry in index.refresh()) == ["a", "b", "c"]


def test_links_and_other_files_are_no_sessions(tmp_path: Path) -> None:
    path = write_session(tmp_path, "a", build_calls("a"))
    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}\n")
    (path.parent / "b.jsonl").symlink_to(secret)
    (path.parent / "folder").symlink_to(tmp_path)
    (path.parent / "notes.txt").write_text("x")
    assert list(look(tmp_path)) == ["a"]


def test_a_broken_file_is_named_and_hurts_no_other(tmp_path: Path) -> None:
    write_session(tmp_path, "a", build_calls("a"))
    bad = tmp_path / "sessions" / ATTEMPT / "train_00000" / "bad.jsonl"
    bad.write_bytes(b"\x00\xff garbage\n" * 3)
    found = look(tmp_path)
    assert found["a"].finished
    assert found["bad"].problem is not None and found["bad"].problem.startswith("cannot be read")
    assert name_stage(found["bad"], 0.0) == "unreadable"


@pytest.mark.parametrize("content", [b"", b'{"type":"session","torn', b"\0\0\0\0"])
def test_a_file_without_a_first_line_begins_or_is_no_session(tmp_path: Path, content: bytes) -> None:
    write_session(tmp_path, "a", build_calls("a"))
    path = tmp_path / "sessions" / ATTEMPT / "train_00000" / "new.jsonl"
    path.write_bytes(content)
    run = RunFolder(tmp_path)

    def look_at_both() -> tuple[str, str]:
        (row,) = [row for row in build_table_rows(run.sessions.refresh(), run.rows, None) if row["rollout"] == "new"]
        with pytest.raises(RecordError) as raised:
            run.build_session(row["key"])
        return row["stage"], str(raised.value)

    stage, told = look_at_both()
    if content[:1] != b"\0":
        assert stage == "preparing" and "nothing is recorded yet" in told
        long_ago_s = path.stat().st_mtime - 2 * sessions.BEGIN_S
        os.utime(path, (long_ago_s, long_ago_s))
        stage, told = look_at_both()
    assert stage == "unreadable" and "holds no session" in told
    assert count_choices(run.build_table())["num_tasks"] == 1, "an empty id is no task"


def test_what_a_page_finds_wrong_is_in_the_table_from_then_on(tmp_path: Path) -> None:
    path = write_session(tmp_path, "a", build_calls("a"))
    path.write_text(path.read_text().replace('"logprobs":[-0.5,-0.5]', '"logprobs":[-0.5]', 1))
    run = RunFolder(tmp_path)
    (row,) = run.build_table()
    assert row["stage"] == "done"
    for _ in range(2):
        with pytest.raises(RecordError, match="line 2: 2 token ids but 1 logprobs"):
            run.build_session(row["key"])
        (row,) = run.build_table()
        assert (row["stage"], row["error"]) == ("unreadable", "cannot be read: line 2: 2 token ids but 1 logprobs")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_session_that_has_lost_its_end_is_damaged(tmp_path: Path, is_known: bool) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        owner = build_owner_tag(process.pid)
    path = write_session(tmp_path, "a", build_calls("a"), owner=owner)
    write_session(tmp_path, "killed", build_calls("killed"), owner=owner, finish=False)
    write_rows(tmp_path, 1, [describe_rollout("a", 0.5)])
    run = RunFolder(tmp_path)
    key = next(row["key"] for row in run.build_table() if row["rollout"] == "a") if is_known else ""
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    if is_known:
        assert run.build_session(key)["row"]["stage"] == "unreadable", "cut after the first look"
    rows = {row["rollout"]: row for row in run.build_table()}
    assert (rows["a"]["stage"], rows["killed"]["stage"]) == ("unreadable", "cut off")
    told = run.build_session(rows["a"]["key"])
    assert (told["row"]["error"], told["calls"]) == (sessions.LOST_END, [])


def test_the_table_sorts_and_filters(tmp_path: Path) -> None:
    for number, reward in enumerate((0.0, 1.0, 0.5, None)):
        name = f"train-00000-g000-r{number:03d}"
        write_session(tmp_path, name, build_calls(name), reward=reward, task_id=f"Task-{number % 2}")
    write_session(
        tmp_path, "train-00001-g000-r000", [], batch="train_00001", stop_reason="no_calls", error="it <b>died</b>"
    )
    rows = build_table_rows(SessionIndex(tmp_path / "sessions").refresh(), TrainedRowIndex(tmp_path / "rows"), "codex")

    def names(**asked: str) -> list[str]:
        return [row["rollout"][-9:] for row in select(rows, asked)]

    assert names()[0] == "g000-r000" and rows[0]["batch"] == "train_00001", "the latest batch comes first"
    assert [row["reward"] for row in select(rows, {"sort": "reward", "batch": "train_00000"})] == [0.0, 0.5, 1.0, None]
    assert [row["reward"] for row in select(rows, {"sort": "reward", "down": "1", "batch": "train_00000"})] == [
        1.0,
        0.5,
        0.0,
        None,
    ]
    assert names(task="Task-1") == ["g000-r001", "g000-r003"]
    assert names(reward=">=0.5", batch="train_00000") == ["g000-r001", "g000-r002"]
    assert names(reward="none") == ["g000-r003"]
    assert names(ended="failed") == ["g000-r000"]
    assert names(search="<b>DIED") == ["g000-r000"]
    assert rows[0]["agent"] == "codex" and rows[1]["seconds"] == 4.0
    for asked in ({"reward": "much"}, {"sort": "beauty"}, {"step": "last"}):
        with pytest.raises(ValueError, match=next(iter(asked.values()))):
            select(rows, asked)
    assert parse_reward("<-1.5")({"reward": -2.0})


def test_finished_sessions_are_not_opened_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        write_session(tmp_path, f"s{number:05d}", build_calls(f"s{number:05d}")[:1], batch=f"train_{number // 50:05d}")
    index = SessionIndex(tmp_path / "sessions")
    assert len(index.refresh()) == 300

    def refuse(entry: Entry) -> bool:
        raise AssertionError(f"{entry.path} was read again")

    monkeypatch.setattr(sessions, "_read_more", refuse)
    assert len(index.refresh()) == 300


def test_a_session_that_ended_well_on_an_answer_that_was_cut(tmp_path: Path) -> None:
    """No trainer has said so: the record has the reason, also in the folder of an evaluation."""
    ask = 'curl -s -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"x\\"}]}" '
    ask += '-H "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/chat/completions; : {instruction}'
    for grader in ("false", "true"):
        engine = ScriptedEngine([RENDERER.spell(Message(role="assistant", text="long " * 50))])
        path = tmp_path / f"{grader}.jsonl"
        run_session(ShellHarness(ask), engine, grader=grader, max_tokens=9, record_path=path)  # type: ignore[arg-type]
    entries = {entry.key: entry for entry in SessionIndex(tmp_path).refresh()}
    assert (entries["false"].reward, entries["false"].stop_reason) == (0.0, "completed")
    assert entries["false"].ended == "the last answer was cut at max_completion_length"
    assert entries["true"].ended == "completed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": None}, "seconds is null"),
        ({"seconds": {"agent": None}}, "agent is null"),
        ({"seconds": {"agent": float("nan")}}, "agent is nan"),
        ({"error": 5}, "error is 5"),
        ({"agent_exit": "died"}, 'agent_exit is "died"'),
        ({"agent_exit": {"signal": "SIGKILL"}}, "exit_code"),
        ({"stop_reason": []}, "stop_reason is []"),
        ({"reward": "1"}, 'reward is "1"'),
        ({"reward": 10**400}, "too large"),
        ({"extra": None}, "extra is null"),
        ({"extra": {"summary": {"calls": None}}}, "calls is null"),
        ({"extra": {"summary": {"calls": 1}}}, "'sampled_tokens' is missing"),
        ({"extra": {"reason": "cut"}}, 'reason is "cut"'),
        ({"extra": {"reason": {"name": 1, "detail": ""}}}, "name is 1"),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_an_odd_end_line_is_a_reason_and_hurts_no_other(
    tmp_path: Path, changes: dict[str, Any], reason: str, is_open: bool
) -> None:
    path = write_session(tmp_path, "odd", build_calls("odd"))
    write_session(tmp_path, "whole", build_calls("whole"), summary=False)
    *lines, end = path.read_text().splitlines(keepends=True)
    odd = json.dumps(json.loads(end) | changes, separators=(",", ":")) + "\n"
    index = SessionIndex(tmp_path / "sessions")
    path.write_text("".join(lines) + ("" if is_open else odd))
    entries = {entry.rollout: entry for entry in index.refresh()}
    path.write_text("".join(lines) + odd)
    index.refresh()
    while index.count_next():
        pass
    assert reason in str(entries["odd"].problem) and not entries["odd"].finished
    assert (entries["whole"].counted, entries["whole"].num_calls) == (True, 3)
    stages = {
        row["rollout"]: row["stage"]
        for row in build_table_rows(index.refresh(), TrainedRowIndex(tmp_path / "rows"), None)
    }
    assert stages == {"odd": "unreadable", "whole": "done"}


def test_a_look_at_three_times_the_folders_takes_three_times_the_work(tmp_path: Path) -> None:
    def count_work(number: int) -> int:
        folder = tmp_path / str(number)
        for batch in range(number):
            (folder / ATTEMPT / f"train_{batch:05d}").mkdir(parents=True)
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (1e9, 1e9))
        index = SessionIndex(folder)
        index.refresh()
        profile = cProfile.Profile()
        profile.runcall(index.refresh)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert count_work(300) < 3.2 * count_work(100)


def test_what_the_trainer_did_with_a_session_is_said_as_it_is(tmp_path: Path) -> None:
    names = {"trained": None, "waiting": None, "flat": "zero_variance", "unjudged": "no_reward"}
    for name in names:
        write_session(tmp_path, name, build_calls(name))
    write_session(tmp_path, "judged", build_calls("judged"), batch="eval_00006")
    write_session(tmp_path, "new", build_calls("new"))
    lines = [describe_rollout(name, 0.5, dropped) for name, dropped in names.items()]
    row = {"type": "row", "rollout": "trained", "record": name_record("trained"), "step": 6}
    write_rows(tmp_path, 6, [*lines, row])
    write_rows(
        tmp_path, 6, [describe_rollout("judged", 0.5) | {"record": name_record("judged", "eval_00006")}], mode="eval"
    )
    rows = TrainedRowIndex(tmp_path / "rows")
    rows.refresh()
    told = {
        row["rollout"]: row["use"]
        for row in build_table_rows(SessionIndex(tmp_path / "sessions").refresh(), rows, None)
    }
    assert told == {
        "trained": "trained",
        "waiting": "to train",
        "flat": "not trained",
        "unjudged": "not trained",
        "judged": "evaluation",
        "new": None,
    }
