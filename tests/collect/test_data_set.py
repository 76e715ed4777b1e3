"""Recorded sessions become a data set: its rows, its split, its files, and the same files every time."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from collect_sessions import CALL, DONE, OTHER_TOOL, TITLE, TOOL, Recorder, record_folder
from datasets import load_dataset
from records import read_session
from tiny_qwen import build_tiny_qwen3

from polar_trl.collect.accept import Acceptance
from polar_trl.collect.data_set import Report, Selection, build_data_set
from polar_trl.collect.examples import build_examples
from polar_trl.collect.split import choose_test_tasks
from polar_trl.errors import ConfigError, LawError, PolarError, RecordError
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout


@pytest.fixture(scope="module")
def recorder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    model = build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("model"))
    return record_folder(model, tmp_path_factory.mktemp("out"))


def build(recorder: Recorder, target: Path, **selection: Any) -> Report:
    return build_data_set(recorder.folder, target, Selection(**selection), agent="shell", model="tiny")


def load(target: Path, form: str) -> dict[str, list[dict[str, Any]]]:
    loaded = load_dataset(str(target), form, cache_dir=str(target.parent / "cache"))
    return {split: list(rows) for split, rows in loaded.items()}


def test_datasets_gives_the_rows_of_this_data_set_and_of_now(recorder: Recorder, tmp_path: Path) -> None:
    """It keeps what it has loaded under a folder's last name and its card."""

    def count(target: Path) -> int:
        loaded = load_dataset(str(target), "tokens", cache_dir=str(tmp_path / "cache"))
        return sum(len(rows) for rows in loaded.values())

    one, other = tmp_path / "one" / "set", tmp_path / "other" / "set"
    whole = build(recorder, one).num_rows("tokens")
    few = build(recorder, other, max_per_task=1).num_rows("tokens")
    assert whole > few > 0
    assert (count(one), count(other)) == (whole, few)
    build(recorder, one, max_per_task=1)
    assert count(one) == few
    assert [path.name for path in one.parent.iterdir()] == ["set"]


def test_rows_are_the_trajectories_of_the_accepted_sessions(recorder: Recorder, tmp_path: Path) -> None:
    build(recorder, tmp_path / "set")
    rows = [row for split in load(tmp_path / "set", "tokens").values() for row in split]
    accepted = [result for result in recorder.results if result.reward == 1.0]
    expected = {
        f"{result.rollout}-{number}": pair
        for result in accepted
        for number, pair in enumerate(recorder.trajectories(result))
    }
    assert len(expected) == 13  # 2 of the session that forked, 11 of the others
    assert {row["id"]: (row["input_ids"], row["assistant_masks"]) for row in rows} == expected
    [forked] = [row for row in rows if row["id"] == "a1-s0-0"]
    sampled = [token for token, bit in zip(forked["input_ids"], forked["assistant_masks"], strict=True) if bit]
    assert recorder.tokenizer.decode(sampled) == CALL + DONE
    about = {name: forked[name] for name in ("task_id", "repo", "reward", "session", "agent")}
    assert about == {
        "task_id": "a1",
        "repo": "alpha",
        "reward": 1.0,
        "session": "sessions/start/a1-s0.jsonl",
        "agent": "shell",
    }


def test_messages_are_what_chat_templates_read(recorder: Recorder, tmp_path: Path) -> None:
    build(recorder, tmp_path / "set")
    rows = {row["id"]: row for split in load(tmp_path / "set", "messages").values() for row in split}
    [first, second] = [rows["a1-s0-0"], rows["a1-s0-1"]]
    call_id = first["messages"][1]["tool_calls"][0]["id"]
    arguments = {"command": "ls"}
    assert first["messages"] == [
        {"role": "user", "content": "List the files of a1."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "shell", "arguments": arguments}}],
        },
        {"role": "tool", "content": "notes.txt", "tool_call_id": call_id},
        {"role": "assistant", "content": "The file is there.", "reasoning_content": "There."},
    ]
    # no key of one tool's schema turns up in another's
    assert (first["tools"], second["tools"]) == ([TOOL], [TOOL, OTHER_TOOL])
    assert second["messages"][0]["content"] == "Summary of a1: one file. Go on."
    # the conversation and the ids are the same thing in the template of the model that was sampled from
    text = recorder.tokenizer.apply_chat_template(second["messages"], tools=second["tools"], tokenize=False)
    tokens = {row["id"]: row for split in load(tmp_path / "set", "tokens").values() for row in split}
    assert text == recorder.tokenizer.decode(tokens["a1-s0-1"]["input_ids"]) + "\n"


def test_the_report_counts_like_the_paper(recorder: Recorder, tmp_path: Path) -> None:
    report = build(recorder, tmp_path / "set")
    assert report.by_repo == {
        "beta": Acceptance(tasks=10, attempts=12, accepted=11, failed=0),
        "alpha": Acceptance(tasks=1, attempts=2, accepted=1, failed=1),
    }
    assert list(report.by_repo) == ["beta", "alpha"]
    assert report.total == Acceptance(tasks=11, attempts=14, accepted=12, failed=1)
    assert report.total.rate == 12 / 14
    assert report.rows["tokens"]["alpha"] == {"train": 2, "test": 0}
    assert (report.num_rows("tokens", "train"), report.num_rows("tokens", "test")) == (12, 1)
    written = json.loads((tmp_path / "set" / "acceptance.json").read_text())
    assert written["total"] == {"tasks": 11, "attempts": 14, "accepted": 12, "failed": 1, "rate": 0.8571}
    card = (tmp_path / "set" / "README.md").read_text()
    assert "| beta | 10 | 12 | 11 | 91.7 | 0 |" in card
    assert "Text only" not in card


def test_the_same_sessions_give_the_same_bytes(recorder: Recorder, tmp_path: Path) -> None:
    for name in ("one", "two", "two"):  # the last one replaces itself
        build(recorder, tmp_path / name)
    one, two = (
        {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("one", "two")
    )
    assert one == two
    assert sorted(re.sub(r"-[0-9a-f]{12}", "", name) for name in one) == [
        "README.md",
        "acceptance.json",
        "messages/test.parquet",
        "messages/train.parquet",
        "tokens/test.parquet",
        "tokens/train.parquet",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("selection", "num_rows", "left_out"),
    [
        ({"max_per_task": 1}, 12, {}),
        ({"num_samples": 1}, 12, {}),
        ({"min_reward": 0.4}, 14, {}),
        ({"min_reward": 0.0}, 15, {}),
        ({"with_auxiliary": True}, 14, {}),
        ({"max_tokens": 230}, 12, {"too_long": 1}),
    ],
)
def test_what_is_selected(
    recorder: Recorder, tmp_path: Path, selection: dict[str, Any], num_rows: int, left_out: dict[str, int]
) -> None:
    report = build(recorder, tmp_path / "set", **selection)
    assert (report.num_rows("tokens"), report.left_out) == (num_rows, left_out)
    assert report.num_rows("messages") == num_rows


@pytest.mark.parametrize(
    "arguments",
    [
        '{"command": ls',
        '{"command": "\\ud83d"}',
        '{"command": NaN}',
        '{"command": 123456789012345678901234567890}',
        '{"command": 1.7976931348623157e308}',  # which the library reads one bit off
    ],
)
def test_arguments_that_templates_or_files_do_not_take_stay_tokens(
    recorder: Recorder, tmp_path: Path, arguments: str
) -> None:
    mine = Recorder(recorder.model, tmp_path)
    broken = CALL.replace('{"command": "ls"}', arguments)
    mine.record("t", 0, 1.0, repo=None, script=(broken, DONE))
    mine.record("u", 0, 1.0, repo=None)
    report = build(mine, tmp_path / "set")
    assert (report.num_rows("tokens"), report.num_rows("messages")) == (2, 1)
    assert report.left_out == {"unreadable_messages": 1}
    assert list(report.by_repo) == ["(none)"]
    assert [row["task_id"] for row in load(tmp_path / "set", "messages")["train"]] == ["u"]


def test_numbers_in_arguments_come_back_as_they_were_written(recorder: Recorder, tmp_path: Path) -> None:
    mine = Recorder(recorder.model, tmp_path)
    numbers = [1e-12, 3.141592653589793, 1e22, 2**63 - 1, -0.1]
    call = CALL.replace('{"command": "ls"}', json.dumps({"command": "ls", "numbers": numbers}))
    mine.record("t", 0, 1.0, repo=None, script=(call, DONE))
    build(mine, tmp_path / "set", test_share=0.0)
    (row,) = load(tmp_path / "set", "messages")["train"]
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"]["numbers"] == numbers
    assert row["tools"] == [TOOL]


def test_a_broken_record_stops_it_and_leaves_what_was_there(recorder: Recorder, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(recorder.folder, folder)
    build_data_set(folder, tmp_path / "set", Selection(), agent="shell", model="tiny")
    before = (tmp_path / "set" / "README.md").read_bytes()
    path = folder / "sessions" / "start" / "b3-s0.jsonl"
    whole = path.read_text()
    first, second, *rest = whole.splitlines()
    call = json.loads(second)
    del call["request"]
    breakages = {
        r"b3-s0\.jsonl, line 2: 'request' is missing\. Put the file back": "\n".join([first, json.dumps(call), *rest]),
        r"b3-s0\.jsonl: its end is missing\. Put the file back": "\n".join(whole.splitlines()[:-1]),
        r"b3-s0\.jsonl: cannot be read \(No such file or directory\)\. Put the file back": None,
    }
    for message, text in breakages.items():
        path.unlink()
        if text is not None:
            path.write_text(text + "\n")
        with pytest.raises(RecordError, match=message):
            build_data_set(folder, tmp_path / "set", Selection(), agent="shell", model="tiny")
        path.touch()
        assert (tmp_path / "set" / "README.md").read_bytes() == before
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "set"]


def test_a_build_that_is_stopped_while_it_replaces_keeps_the_earlier_one(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "set"
    build(recorder, target)
    before = (target / "README.md").read_bytes()
    rename = Path.rename

    def stop(self: Path, to: Path) -> Path:
        if to == target and not self.name.endswith(".before"):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        build(recorder, target, max_per_task=1)
    assert (target / "README.md").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_nothing_accepted_writes_nothing(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(PolarError, match=r"none of 14 graded sessions .* a reward of 2 or more, and 1 failed"):
        build(recorder, tmp_path / "set", min_reward=2.0)
    with pytest.raises(PolarError, match="12 sessions were accepted, but none of their rows is left"):
        build(recorder, tmp_path / "set", max_tokens=5)
    assert not any(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else than a data set"):
        build(recorder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_reward": float("nan")}, "min_reward is nan"),
        ({"test_share": 1.0}, "test_share is 1.0"),
        ({"max_per_task": 0}, "max_per_task is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
    ],
)
def test_selections_without_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selection(**settings)


def test_the_split_is_by_task_within_each_repository() -> None:
    repos = {
        f"{repo}-{number}": repo for repo, size in (("a", 20), ("b", 15), ("c", 5), ("d", 1)) for number in range(size)
    }
    test = choose_test_tasks(repos, share=0.1, seed=0)
    taken = {repo: sum(task.startswith(repo) for task in test) for repo in "abcd"}
    assert taken == {"a": 2, "b": 2, "c": 0, "d": 0}  # of 2, 1.5 and 0.5: four in all, the larger repository first
    assert choose_test_tasks(dict(reversed(repos.items())), share=0.1, seed=0) == test
    assert choose_test_tasks(repos, share=0.1, seed=1) != test
    assert choose_test_tasks(repos, share=0.0, seed=0) == frozenset()
    # a repository keeps a task to train on, however much is asked for
    assert len(choose_test_tasks({"x": "r", "y": "r"}, share=0.9, seed=0)) == 1


def test_no_task_is_on_both_sides(recorder: Recorder, tmp_path: Path) -> None:
    build(recorder, tmp_path / "set", test_share=0.5)
    splits = {split: {row["task_id"] for row in rows} for split, rows in load(tmp_path / "set", "tokens").items()}
    assert len(splits["test"]) == 5
    assert not splits["train"] & splits["test"]


def test_text_is_never_taken_for_tokens() -> None:
    call = Call(
        session_id="s",
        index=0,
        dialect="openai_chat",
        request=ChatRequest(messages=(Message(role="user", text="hi"),)),
        prompt_ids=(),
        completion=Completion(token_ids=(), logprobs=(), finish_reason="stop"),
        message=Message(role="assistant", text="hello"),
        text_only=True,
    )
    [row] = build_examples(Rollout(id="s", task_id="t", group_id="g", calls=(call,)))
    assert (row.token_ids_T, row.mask_T) == (None, None)
    assert row.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_a_record_that_breaks_a_law_is_no_row(recorder: Recorder) -> None:
    rollout = read_session(recorder.folder / "sessions" / "start" / "b0-s0.jsonl")
    calls = (rollout.calls[0], dataclasses.replace(rollout.calls[1], index=5))
    with pytest.raises(LawError, match="b0-s0"):
        build_examples(dataclasses.replace(rollout, calls=calls))


def test_titles_are_rows_only_if_asked_for(recorder: Recorder) -> None:
    rollout = read_session(recorder.folder / "sessions" / "start" / "a1-s0.jsonl")
    assert [row.messages and row.messages[0]["content"] for row in build_examples(rollout, with_auxiliary=True)] == [
        "Name this.",
        "List the files of a1.",
        "Summary of a1: one file. Go on.",
    ]
    assert TITLE.endswith("A title<|im_end|>")
