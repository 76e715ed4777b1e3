"""Tokens on the page: texts, lines, tracks with the trainer's figures, and forks."""

import json
from ast import literal_eval
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import (
    build_call,
    describe_rollout,
    name_record,
    write_long_session,
    write_rows,
    write_session,
)
from tokenizers import Tokenizer

from polar_trl.errors import ConfigError
from polar_trl.recording.log import SessionRecord, read_record
from polar_trl.tools.inspector.conversation import build_calls, clean, read_text
from polar_trl.tools.inspector.forks import find_fork
from polar_trl.tools.inspector.layout import build_lines
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.tools.inspector.token_tracks import STATES, TokenTrack, build_tracks
from polar_trl.tools.inspector.trained_rows import RolloutOutcome, TrainedRow, TrainedRowIndex
from polar_trl.tools.inspector.vocabulary import (
    NUMBER,
    PART,
    SPECIAL,
    TEXT,
    Pieces,
    Vocabulary,
    count_columns,
    load_vocabulary,
    show,
)
from polar_trl.types import Call, Message, Rollout, Tool, ToolCall

SYSTEM, USER = Message(role="system", text="You fix code."), Message(role="user", text="Fix it.")
TRAIN = RolloutOutcome(mode="train", step=3, reward=1.0, advantage=0.5, dropped=None)


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return load_vocabulary(str(smollm2))


def test_a_character_of_several_tokens_shows_bytes_then_itself(vocabulary: Vocabulary, smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = "naïve 🧵\u202eline\n\tend\x1b[31m<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = vocabulary.spell(ids)
    assert PART in pieces.kinds_T, "the thread is no token of its own in this vocabulary"
    whole = "".join(text for text, kind in zip(pieces.texts_T, pieces.kinds_T, strict=True) if kind != PART)
    assert whole == "naïve 🧵⟨U+202E⟩line↵⇥end␛[31m<|im_end|>"
    assert pieces.kinds_T[-1] == SPECIAL
    assert pieces.texts_T[pieces.kinds_T.index(PART)].startswith("⟨")
    raw = b"".join(literal_eval("b" + vocabulary.describe(token_id)) for token_id in ids)
    assert raw == text.encode(), "the bytes of the tokens, joined, are the text's"
    assert pieces.newlines_T.count(True) == 1


def test_every_token_of_the_vocabulary_has_the_bytes_that_its_tokenizer_gives(
    vocabulary: Vocabulary, smollm2: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for token_id in range(0, tokenizer.get_vocab_size(), 37):
        raw = literal_eval("b" + vocabulary.describe(token_id))
        if b"\xef\xbf\xbd" not in (decoded := tokenizer.decode([token_id], skip_special_tokens=False).encode()):
            assert raw == decoded, token_id


def test_without_a_tokenizer_ids_are_numbers_and_a_note_says_what_to_do(tmp_path: Path) -> None:
    for name in (None, str(tmp_path / "gone"), "nobody/no-such-model"):
        unknown = load_vocabulary(name)
        assert not unknown.is_known and "--tokenizer PATH" in unknown.note
    pieces = Vocabulary(None, "").spell([7, -1, 123456])
    assert (pieces.texts_T, pieces.kinds_T) == (["7 ", "-1 ", "123456 "], [NUMBER] * 3)
    with pytest.raises(ConfigError, match=r"--tokenizer .*no tokenizer\.json"):
        load_vocabulary(None, flag=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_vocabulary(None, flag=str(tmp_path))


@pytest.mark.parametrize(
    "char", "\u061c\u00ad\u200c\u200d\u180e\u2028\u2029\U000e0041\ue000\u3164\ufe0f\U000e0100\U000e0002"
)
def test_no_hidden_character_passes(char: str) -> None:
    assert clean(f"a{char}b") == f"a⟨U+{ord(char):04X}⟩b"


def test_emoji_and_letters_stay_as_they_are() -> None:
    text = "naïve 漢字 עברית \xa0👩🏽\u200d💻 ❤\ufe0f\u200d🔥 👨\u200d👩\u200d👧"
    assert clean(text) == text


def test_what_acts_on_a_reader_is_shown_by_name() -> None:
    assert show("a\x00\x1b\x7f\u200b\u2066b") == "a␀␛␡⟨U+200B⟩⟨U+2066⟩b"
    assert clean("a\n\tb\x1b[0m\u202e\ud800") == "a\n\tb␛[0m⟨U+202E⟩⟨U+D800⟩"
    assert [count_columns(text) for text in ("abc", "日本", "é", "e\u0301")] == [3, 4, 1, 1]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=80),
    st.sets(st.integers(0, 79)),
    st.integers(1, 40),
)
def test_lines_hold_every_token_once_and_no_more_than_fits(
    tokens: list[tuple[int, bool]], edges: set[int], columns: int
) -> None:
    pieces = Pieces(
        texts_T=["x" * width for width, _ in tokens],
        kinds_T=[TEXT] * len(tokens),
        newlines_T=[end for _, end in tokens],
    )
    lines = build_lines(pieces, edges, columns)
    bounds = [*lines.starts_L.tolist(), len(tokens)]
    assert bounds == sorted(set(bounds)) and (bounds[0] == 0 or not tokens)
    for start, end in pairwise(bounds):
        assert (
            sum(width for width, _ in tokens[start:end]) <= columns
            or end == start + 1
            or not any(width for width, _ in tokens[start + 1 : end])
        )
        assert not any(newline for _, newline in tokens[start : end - 1])
        assert not edges & set(range(start + 1, end))
        assert lines.find_line(start) == lines.find_line(end - 1) == bounds.index(start)
    assert lines.tokens_of(0, len(bounds)) == ((0, len(tokens)) if tokens else (0, 0))


def record_of(calls: list[Call], **rollout: Any) -> SessionRecord:
    fields = {"reward": 1.0} | rollout
    ended = Rollout(id="s", task_id="t", group_id="g", calls=tuple(calls), **fields)
    return SessionRecord(rollout=ended, extra={}, finished=True)


def three_turns() -> list[Call]:
    """A chain of two calls, a superseded copy, an auxiliary call."""
    return [
        build_call("s", 0, (1, 2), (10, 11), logprobs=(-0.1, -0.2), version=3),
        build_call("s", 1, (1, 2, 10, 11, 4), (20, 21, 22), logprobs=(-1.0, -2.0, -3.0), version=4, parent=0),
        build_call("s", 2, (1, 2, 10, 11, 4), (30,), version=4, parent=0),
        build_call("s", 3, (1, 2, 10, 11, 4, 30, 5), (31,), version=4, parent=2),
        build_call("s", 4, (8,), (40,), purpose="auxiliary"),
    ]


def states_of(track: TokenTrack) -> list[str]:
    return [STATES[code] for code in track.states_T]


def test_tracks_carry_the_trainers_figures(tmp_path: Path) -> None:
    write_session(tmp_path, "s", three_turns())
    row = {"type": "row", "step": 3, "rollout": "s", "record": name_record("s"), "calls": [0], "num_tokens": 4}
    again = row | {"step": 4, "trained": [[2, 4]], "advantage": 0.5, "logprobs": [-9.0, -9.0]}
    first = row | {"trained": [[3, 4]], "advantage": 0.5, "logprobs": [-0.25]}
    write_rows(tmp_path, 3, [describe_rollout("s", 0.5), first, again])
    rows = TrainedRowIndex(tmp_path / "rows")
    rows.refresh()
    key = name_record("s").removeprefix("sessions/").removesuffix(".jsonl")
    outcome = rows.find_outcome(key)
    assert outcome is not None and (outcome.step, outcome.advantage, outcome.dropped) == (3, 0.5, None)
    tracks = build_tracks(read_record(tmp_path / name_record("s")), outcome, rows.read_rows(key), None)
    assert [(track.name, track.calls) for track in tracks] == [
        ("trajectory 0", (0, 2, 3)),
        ("auxiliary call 4", (4,)),
        ("superseded call 1", (1,)),
    ] or [(track.name, track.calls) for track in tracks] == [
        ("trajectory 0", (0, 2, 3)),
        ("superseded call 1", (1,)),
        ("auxiliary call 4", (4,)),
    ]
    track = tracks[0]
    assert track.ids_T.tolist() == [1, 2, 10, 11, 4, 30, 5, 31]
    # the first pass counts: token 2 was stale in it, and what came after the row was too long
    assert states_of(track) == ["context"] * 2 + ["stale", "trained", "context", "too_long", "context", "too_long"]
    assert np.allclose(track.gaps_T[3], -0.25 + 0.2, atol=1e-6)
    assert np.isnan(track.gaps_T[[0, 1, 2, 4, 5, 6, 7]]).all()
    assert track.versions_T.tolist() == [-1, -1, 3, 3, -1, 4, -1, 4]
    assert track.count_states() == {"trained": 1, "too_long": 2, "stale": 1}
    assert {track.name.split()[0]: states_of(track)[-1] for track in tracks[1:]} == {
        "auxiliary": "auxiliary",
        "superseded": "superseded",
    }


@pytest.mark.parametrize(
    ("outcome", "error", "state"),
    [
        (None, None, "trainable"),
        (None, "the grader failed", "no_reward"),
        (replace(TRAIN, dropped="zero_variance"), None, "zero_variance"),
        (replace(TRAIN, dropped="no_reward"), None, "no_reward"),
        (replace(TRAIN, dropped="cut"), None, "cut"),
        (replace(TRAIN, mode="eval"), None, "evaluation"),
        (TRAIN, None, "trainable"),
    ],
)
def test_what_is_not_trained_says_why(outcome: RolloutOutcome | None, error: str | None, state: str) -> None:
    record = record_of(three_turns()[:2], error=error, reward=None if error else 1.0)
    (track,) = build_tracks(record, outcome, [], None)
    assert states_of(track) == ["context"] * 2 + [state] * 2 + ["context"] + [state] * 3


def test_calls_that_were_not_chosen_are_told_from_those_that_were_too_long() -> None:
    calls = three_turns()[:2]
    record = record_of(calls)
    spans = [(len(call.prompt_ids), len(call.prompt_ids) + len(call.completion.token_ids)) for call in calls]

    def trained(*indices: int) -> TrainedRow:
        mine = tuple(spans[index] for index in indices)
        count = sum(end - start for start, end in mine)
        return TrainedRow(
            calls=indices, num_tokens=mine[-1][1], trained=mine, advantage=1.0, step=1, logprobs=(-0.5,) * count
        )

    for kept, left_out in ((0, 1), (1, 0)):
        (track,) = build_tracks(record, TRAIN, [trained(kept)], spans[1][1], chooses_turns=True)
        states = states_of(track)
        assert {*states[slice(*spans[kept])]} == {"trained"} and {*states[slice(*spans[left_out])]} == {"not_chosen"}
    (track,) = build_tracks(record, TRAIN, [trained(0)], spans[0][1], chooses_turns=True)
    assert {*states_of(track)[slice(*spans[1])]} == {"too_long"}


def reply(text: str = "ok", reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(role="assistant", text=text, reasoning=reasoning, tool_calls=calls)


BASH = Tool(name="bash")
THOUGHT = reply("done", "let me think")
MORE = Message(role="user", text="Thanks. And now?")
RUN = reply("", None, ToolCall(id="a", name="bash", arguments='{"x": 1}'))
BEFORE = build_call("s", 0, (1, 2, 3), (10, 11, 12), messages=(SYSTEM, USER), reply=THOUGHT)


@pytest.mark.parametrize(
    ("reason", "first", "prompt", "fields", "shared"),
    [
        ("sub-agent", BEFORE, (1, 9), {"messages": (Message(role="system", text="You search."), USER)}, 1),
        ("sub-agent", BEFORE, (1, 9), {"messages": (USER,), "tools": (BASH,)}, 1),
        ("tools changed", BEFORE, (1, 9), {"messages": (SYSTEM, USER, THOUGHT, MORE), "tools": (BASH,)}, 1),
        ("new conversation", BEFORE, (1, 2, 9), {"messages": (SYSTEM, MORE)}, 2),
        ("thinking dropped", BEFORE, (1, 2, 3, 11, 12, 4), {"messages": (SYSTEM, USER, reply("done"), MORE)}, 3),
        (
            "template rewrote a turn",
            replace(BEFORE, message=RUN),
            (1, 2, 3, 10, 99, 4),
            {"messages": (SYSTEM, USER, RUN, Message(role="tool", text="1"))},
            4,
        ),
        ("compaction", BEFORE, (1, 2, 3, 8), {"messages": (SYSTEM, USER)}, 3),
        ("rewritten history", BEFORE, (1, 2, 3, 8), {"messages": (SYSTEM, USER, reply("edited"), MORE)}, 3),
    ],
)
def test_a_fork_says_where_and_why(
    reason: str, first: Call, prompt: tuple[int, ...], fields: dict[str, Any], shared: int
) -> None:
    calls = [first, build_call("s", 1, prompt, (50,), **fields)]
    tracks = build_tracks(record_of(calls), None, [], None)
    assert len(tracks) == 2
    fork = find_fork(tracks[1], tracks[:1], calls)
    assert fork is not None
    assert (fork.reason, fork.num_shared, fork.call, fork.other_track, fork.other_call) == (reason, shared, 1, 0, 0)
    assert fork.explanation.endswith(".")


def test_two_continuations_of_one_reply_are_a_branch() -> None:
    calls = [
        BEFORE,
        build_call("s", 1, (1, 2, 3, 10, 11, 12, 4), (20,)),
        build_call("s", 2, (1, 2, 3, 10, 11, 12, 5), (30,)),
    ]
    tracks = build_tracks(record_of(calls), None, [], None)
    fork = find_fork(tracks[1], tracks[:1], calls)
    assert fork is not None and (fork.reason, fork.num_shared, fork.other_call) == ("branch", 6, 1)
    assert find_fork(tracks[0], [], calls) is None


def test_a_conversation_shows_what_each_call_adds() -> None:
    tool = Message(role="tool", text="<script>alert(1)</script>\x1b[31m" + "x" * 1_000_000, tool_call_id="a")
    calls = (
        build_call("s", 0, (1,), (2,), messages=(SYSTEM, USER), reply=RUN, tools=(BASH,)),
        build_call(
            "s", 1, (1, 2, 3), (4,), messages=(SYSTEM, USER, RUN, tool), reply=THOUGHT, tools=(BASH,), parent=0
        ),
    )
    first, second = build_calls(calls, 0, 10, {})
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (first["tools"], second["tools"]) == (["bash"], None)
    assert (second["repeated"], second["repeated_of"], second["repeats_reply"]) == (3, 0, True)
    (result,) = second["messages"]
    assert result["text"]["length"] == 1_000_030 and len(result["text"]["text"]) == 4000
    assert result["text"]["text"].startswith("<script>alert(1)</script>␛[31m")
    assert second["reply"]["reasoning"]["text"] == "let me think"
    assert first["reply"]["tool_calls"][0]["arguments"]["text"] == '{"x": 1}'
    offset, blocks = 0, []
    while offset < 1_000_030:
        block = read_text(calls[1], "m3.text", offset)
        blocks.append(block["text"])
        offset = block["next"]
    assert "".join(blocks) == clean(tool.text)
    assert json.loads(read_text(calls[0], "tools", 0)["text"])[0]["name"] == "bash"
    for part in ("m9.text", "reply.nothing", "reply.arguments.5", "../x", "", "m-1.text"):
        with pytest.raises(KeyError):
            read_text(calls[0], part, 0)


def test_a_window_of_a_long_session_is_small(tmp_path: Path, smollm2: Path) -> None:
    write_long_session(tmp_path, "long-g000-r000", num_tokens=30_000, num_calls=60, vocabulary=49_000)
    run = RunFolder(tmp_path, str(smollm2))
    (row,) = run.build_table()
    view = run.open_session(row["key"])
    assert (row["calls"], row["trajectories"], row["advantage"]) == (60, 1, 0.75)
    (track,) = view.tracks
    assert len(track.ids_T) == 30_000 and track.count_states() == {"trained": 3000}
    meta = json.dumps(view.build_meta())
    window = view.build_lines(0, 120, 200, 60)
    assert len(meta) < 30_000 and len(json.dumps(window)) < 120_000
    assert window["num_lines"] > 1000 and len(window["starts"]) == 60
    start, end = window["starts"][0], window["end"]
    assert window["ids"] == track.ids_T[start:end].tolist()
    gaps = [None if value is None or engine is None else value - engine
            for value, engine in zip(window["trainer"], window["engine"], strict=True)]  # fmt: skip
    assert [gap is not None for gap in gaps] == (track.states_T[start:end] > 0).tolist()
    assert max(abs(gap) for gap in gaps if gap is not None) < 0.06
    assert view.build_lines(0, 120, 200, 10_000)["end"] <= view.build_lines(0, 120, 600, 0)["end"]
    overview = view.build_overview(0, 120, 300)
    assert {len(overview[name]) for name in ("gap", "engine", "states", "versions")} == {300}
    largest = track.gaps_T[np.nanargmax(np.abs(track.gaps_T))]
    assert np.isclose(max(overview["gap"], key=abs), largest, atol=1e-5)
    assert view.find_line(0, 120, start) == 200
    with pytest.raises(IndexError):
        view.build_lines(7, 120, 0, 10)
