"""Records are read back as they were written, from files that grow with the tokens, whatever killed the writer."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import TOOL, build_call, build_rollout, open_log, read_session

from polar_trl.errors import RecordError
from polar_trl.recording.log import read_record
from polar_trl.types import (
    AgentExit,
    Call,
    ChatRequest,
    Completion,
    GradeReport,
    Message,
    RequestedSampling,
    Rollout,
    Tool,
    ToolCall,
)


def write(path: Path, rollout: Rollout, **extra: Any) -> None:
    log = open_log(path)
    for call in rollout.calls:
        log.append(call)
    log.close(rollout, extra)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_session_is_read_back_equal(tmp_path: Path) -> None:
    first = build_call(
        0,
        request=ChatRequest(
            messages=(
                Message(role="system", text="Grüße \U0001f600\u2028\x00"),
                Message(role="user", images=("data:image/png;base64,AA==",)),
            ),
            tools=(TOOL, Tool(name="big", parameters=MappingProxyType({"maximum": 2**70, "minimum": 1e-320}))),
            tool_choice="shell",
            sampling=RequestedSampling(max_tokens=3, temperature=0.7, top_p=0.1, top_k=5, stop=("\n", "x")),
            model="gpt",
            unread=("metadata.user_id",),
        ),
        completion=Completion(
            token_ids=(151645, 0),
            logprobs=(-1e-300, 0.1 + 0.2 - 4),
            finish_reason="tool_calls",
            first_policy_version=3,
            last_policy_version=4,
        ),
        message=Message(
            role="assistant",
            reasoning="",
            tool_calls=(
                ToolCall(id="c", name="shell", arguments='{"cmd": "ls', parse_status="malformed"),
                ToolCall(id="d", name="shell", arguments=' {"a":\t1}'),
            ),
        ),
    )
    second = build_call(1, first, purpose="auxiliary")
    rollout = build_rollout(
        first,
        second,
        reward=0.0,
        stop_reason="agent_timeout",
        error="late",
        error_kind="sandbox_failed",
        agent_exit=AgentExit(exit_code=137, signal="SIGKILL", output_tail="Grüße \x1b[2J"),
        grading=GradeReport(output_tail="no", failed_tests=("a::b",), num_tests=1, num_failed=1),
        changes="--- a/f\n+++ b/f\n",
        agent="pi",
        call_rewards={0: -0.25, 2: 1.0},
        seconds={"agent": 1.5},
        counters={"n": 2},
    )
    write(tmp_path / "a.jsonl", rollout, trajectory_digest="abc")
    record = read_record(tmp_path / "a.jsonl")
    assert record.rollout == rollout
    assert record.extra == {"trajectory_digest": "abc"}
    assert record.finished
    assert read_session(tmp_path / "a.jsonl") == rollout


texts = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["\ud800", "a\udfff", "\ud83d\ude00", "\udc80\ud800", '"\\\n', "\x7f\x85\u2029"]
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def sessions(draw: st.DrawFn) -> Rollout:
    calls: list[Call] = []
    for index in range(draw(st.integers(0, 4))):
        parent = draw(st.none() | st.sampled_from(calls)) if calls else None
        call = build_call(index, parent, started_s=draw(numbers), duration_s=draw(numbers))
        token_ids = draw(st.lists(st.integers(0, 2**31), max_size=3).map(tuple))
        logprobs = tuple(draw(numbers) for _ in token_ids)
        tool_call = ToolCall(id=draw(texts), name=draw(texts), arguments=draw(texts), parse_status="malformed")
        history = call.request.messages[draw(st.integers(0, 1)) :]
        call = replace(
            call,
            prompt_ids=call.prompt_ids[draw(st.integers(0, 1)) :],
            request=ChatRequest(
                messages=(*history, Message(role="user", text=draw(texts), reasoning=draw(st.none() | texts))),
                tools=draw(
                    st.sampled_from([(TOOL,), (), (TOOL, Tool(name="x", parameters={"d": draw(json_values)}))])
                ),
            ),
            completion=Completion(token_ids=token_ids, logprobs=logprobs, finish_reason="length"),
            message=Message(role="assistant", text=draw(texts), tool_calls=(tool_call,) * draw(st.integers(0, 2))),
        )
        calls.append(call)
    return build_rollout(*calls, error=draw(st.none() | texts), reward=draw(st.none() | numbers))


@settings(max_examples=150, deadline=None)
@given(sessions())
def test_any_session_is_read_back_exactly(tmp_path_factory: pytest.TempPathFactory, rollout: Rollout) -> None:
    path = tmp_path_factory.mktemp("any") / "s.jsonl"
    write(path, rollout)
    back = read_session(path)
    assert back == rollout
    assert repr(back) == repr(rollout)  # tells 1 from 1.0 and 0.0 from -0.0, which == does not


def test_a_hundred_calls_are_linear_on_disk(tmp_path: Path) -> None:
    calls = [build_call(0, prompt_ids=tuple(range(100000, 101000)))]
    for index in range(1, 100):
        calls.append(build_call(index, calls[-1]))
    write(tmp_path / "a.jsonl", build_rollout(*calls))
    sizes = [len(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()[1:-1]]
    assert sizes[0] > 7000
    assert max(sizes[1:]) - min(sizes[1:]) < 50
    read = read_session(tmp_path / "a.jsonl").calls
    assert read == tuple(calls)
    assert sum(len(call.prompt_ids.own) for call in read) == len(calls[-1].prompt_ids)
    assert sum(len(call.request.messages.own) for call in read) == len(calls[-1].request.messages)


def test_a_continued_call_is_written_as_what_it_adds(tmp_path: Path) -> None:
    first = build_call(0)
    write(tmp_path / "a.jsonl", build_rollout(first, build_call(1, first)))
    line = read_lines(tmp_path / "a.jsonl")[2]
    assert line["new_prompt_ids"] == [7, 1]
    assert [message["text"] for message in line["new_messages"]] == ["ok"]
    assert not line.keys() & {"prompt_ids", "messages", "tools"}


def test_what_is_no_prefix_is_written_whole(tmp_path: Path) -> None:
    first = build_call(0)
    other_ids = build_call(1, first, prompt_ids=(1, 2, 0, 501, 7))
    other_messages = build_call(2, first, request=ChatRequest(messages=(Message(role="user", text="new"),)))
    shorter = build_call(3, first, prompt_ids=first.prompt_ids, request=first.request)
    rollout = build_rollout(first, other_ids, other_messages, shorter)
    write(tmp_path / "a.jsonl", rollout)
    lines = read_lines(tmp_path / "a.jsonl")
    assert lines[2]["prompt_ids"] == [1, 2, 0, 501, 7]
    assert "new_messages" in lines[2] and "tools" not in lines[2]
    assert [message["text"] for message in lines[3]["messages"]] == ["new"]
    assert "new_prompt_ids" in lines[3] and lines[3]["tools"] == []
    assert lines[4]["prompt_ids"] == [1, 2, 0] and len(lines[4]["messages"]) == 1
    assert read_session(tmp_path / "a.jsonl") == rollout


def test_a_record_from_before_there_were_kinds_of_errors_is_read(tmp_path: Path) -> None:
    path, rollout = tmp_path / "a.jsonl", build_rollout(build_call(0), error="late", error_kind="no_calls")
    write(path, rollout, trajectory_digest="abc")
    text = path.read_text()
    path.write_text(text.replace('"error_kind":"no_calls",', ""))
    record = read_record(path)
    assert path.read_text() != text
    assert (record.rollout, record.extra) == (replace(rollout, error_kind=None), {"trajectory_digest": "abc"})


def test_the_log_holds_what_it_was_given() -> None:
    log = open_log(None)
    assert (log.session_id, log.calls, log.counters) == ("s", (), {})
    before = log.calls
    first = build_call(0)
    log.append(first)
    log.count("retries")
    log.count("retries")
    assert log.calls == (first,) and log.calls[0] is first
    assert log.counters == {"retries": 2}
    assert before == ()


def test_each_call_is_on_disk_before_append_returns(tmp_path: Path) -> None:
    log = open_log(tmp_path / "deep" / "down" / "a.jsonl")
    first = build_call(0)
    log.append(first)
    rollout = read_session(tmp_path / "deep" / "down" / "a.jsonl")
    assert rollout.calls == (first,)
    assert (rollout.id, rollout.task_id, rollout.group_id) == ("s", "t", "g")
    assert (rollout.stop_reason, rollout.error_kind, rollout.reward) == ("cancelled", "cancelled", None)
    assert rollout.error == "the record has no end: the session was killed after 1 recorded calls"
    assert not read_record(tmp_path / "deep" / "down" / "a.jsonl").finished


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", build_rollout())
    before = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(RecordError, match=r"a\.jsonl exists already"):
        open_log(tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_cut_anywhere_the_whole_lines_before_are_kept(tmp_path: Path) -> None:
    first = build_call(0, message=Message(role="assistant", text="Grüße \ud800"))
    calls = (first, build_call(1, first))
    write(tmp_path / "a.jsonl", build_rollout(*calls, reward=1.0))
    data = (tmp_path / "a.jsonl").read_bytes()
    line_ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for length in range(len(data) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:length])
        num_lines = sum(end <= length for end in line_ends)
        if num_lines == 0:
            with pytest.raises(RecordError, match="holds no session"):
                read_session(path)
            continue
        record = read_record(path)
        assert record.rollout.calls == calls[: num_lines - 1]
        assert record.finished == (num_lines == 4)


END = b'{"type":"end","stop_reason":"completed","reward":null,"error":null,"seconds":{},"counters":{},"extra":{}}'


@pytest.mark.parametrize(
    ("number", "bad", "reason"),
    [
        (1, b'{"type":"session"', "Expecting"),
        (1, b'{"type":"call"}', "expected the session line"),
        (1, b'{"type":"session","version":99}', "version 99"),
        (2, b"", "Expecting value"),
        (2, b"[]", "expected a JSON object, got list"),
        (2, b"\xff\xfe", "can't decode"),
        (2, b'{"type":"other"}', "unknown type 'other'"),
        (2, b'{"type":"call","index":0,"parent":null}', "'new_prompt_ids' is missing"),
        (2, b'{"type":"call","index":0,"parent":0}', "parent 0 is not an earlier call"),
        (2, b'{"type":"call","index":0,"parent":null,"prompt_ids":["1"]}', "not integers"),
        (3, b'{"type":"call","index":0}', "call index 0, expected 1"),
        (3, b'{"type":"end"}', "'stop_reason' is missing"),
        (4, b'{"type":"end"', "Expecting"),
        (4, END.replace(b"}}", b'},"agent_exit":{"exit_code":"1"}}'), "exit_code is '1'"),
        (4, END.replace(b"}}", b'},"agent_exit":{"code":1}}'), "unexpected keyword argument 'code'"),
        (4, END.replace(b"}}", b'},"grading":{"failed_tests":[1],"missing_tests":[]}}'), "failed_tests is"),
        (4, END.replace(b"}}", b'},"changes":1}'), "changes is 1"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, number: int, bad: bytes, reason: str) -> None:
    first = build_call(0)
    write(tmp_path / "a.jsonl", build_rollout(first, build_call(1, first)))
    lines = (tmp_path / "a.jsonl").read_bytes().split(b"\n")
    lines[number - 1] = bad
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match=rf"a\.jsonl, line {number}: .*{reason}"):
        read_session(tmp_path / "a.jsonl")


def test_a_line_after_the_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", build_rollout())
    data = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(data + data.splitlines()[-1] + b"\n")
    with pytest.raises(RecordError, match="line 3: a line after the end"):
        read_session(tmp_path / "a.jsonl")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.jsonl: cannot be read \(No such file"):
        read_session(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (build_call(1), "call index 1, expected 0"),
        (build_call(0, session_id="other"), "'other' in the record of 's'"),
        (replace(build_call(0), parent=0), "call 0 has parent 0"),
        (replace(build_call(0), parent=-1), "call 0 has parent -1"),
    ],
)
def test_a_call_out_of_place_is_refused(tmp_path: Path, call: Call, reason: str) -> None:
    log = open_log(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=reason):
        log.append(call)
    assert log.calls == ()
    assert len(read_lines(tmp_path / "a.jsonl")) == 1


def test_a_rollout_that_is_not_this_session_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path / "a.jsonl")
    log.append(build_call(0))
    with pytest.raises(ValueError, match="closed with a rollout of"):
        log.close(build_rollout(build_call(0), group_id="other"))
    with pytest.raises(ValueError, match="1 calls were recorded, but not those 0 of its rollout"):
        log.close(build_rollout())
    log.close(build_rollout(build_call(0)))
    assert read_record(tmp_path / "a.jsonl").finished


def test_nothing_is_added_after_the_end() -> None:
    log = open_log(None)
    log.close(build_rollout())
    with pytest.raises(RecordError, match="call 0 came too late"):
        log.append(build_call(0))
    with pytest.raises(RecordError, match="closed already"):
        log.close(build_rollout())


def test_threads_may_count_and_append(tmp_path: Path) -> None:
    log = open_log(tmp_path / "a.jsonl")
    turn = threading.Lock()

    def work() -> None:
        for _ in range(50):
            log.count("work")
            with turn:  # the index has to be right, so taking it and appending are one step
                log.append(build_call(len(log.calls)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.counters == {"work": 200}
    assert read_session(tmp_path / "a.jsonl").calls == tuple(build_call(i) for i in range(200))


FULL_DISK = """
import resource, sys
from pathlib import Path
from records import build_call, build_rollout, open_log
from polar_trl.types import Message
log = open_log(Path(sys.argv[1]))
log.append(build_call(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    log.append(build_call(1, message=Message(role="assistant", text="x" * 100_000)))
except OSError as error:
    print(type(error).__name__, len(log.calls))
log.append(build_call(1))
log.close(build_rollout(build_call(0), build_call(1)))
"""


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == "OSError 1\n", done.stderr
    assert read_session(path) == build_rollout(build_call(0), build_call(1))
