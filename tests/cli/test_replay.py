"""`polar-trl replay`: the totals of a folder of sessions, and an exit status that tells whether they still hold."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_trl.cli import main
from polar_trl.reconstruct import Reconstruction, build_per_request, build_prefix_merged, digest
from polar_trl.recording.log import SessionLog
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout

TURNS = [((1,), (10, 11)), ((1, 10, 11, 2), (12,)), ((7,), (20,)), ((7,), (21, 22))]


def build_rollout(session_id: str) -> Rollout:
    """Two turns of a conversation, then a sub-agent that was asked twice: 6 sampled tokens, 5 trained in 2 rows."""
    calls = [
        Call(
            session_id=session_id,
            index=index,
            dialect="openai_chat",
            request=ChatRequest(messages=(Message(role="user", text="hi"),)),
            prompt_ids=prompt,
            completion=Completion(token_ids=sampled, logprobs=(-0.5,) * len(sampled), finish_reason="stop"),
            message=Message(role="assistant"),
        )
        for index, (prompt, sampled) in enumerate(TURNS)
    ]
    return Rollout(id=session_id, task_id="t", group_id="g", calls=tuple(calls), reward=1.0)


def write(path: Path, *, finish: bool = True, **extra: Any) -> None:
    log = SessionLog(session_id=path.stem, task_id="t", group_id="g", path=path)
    rollout = build_rollout(path.stem)
    for call in rollout.calls:
        log.append(call)
    if finish:
        log.close(rollout, extra)


def replay(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON report (empty if there is none), standard error."""
    status = main(["replay", "--json", *map(str, args)])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else {}, err


def test_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = digest(build_prefix_merged(build_rollout("a")).trajectories)
    write(tmp_path / "sessions" / "step-0" / "a.jsonl", trajectory_digest=good)
    write(tmp_path / "sessions" / "b.jsonl")
    write(tmp_path / "sessions" / "c.jsonl", finish=False)
    (tmp_path / "sessions" / "notes.txt").write_text("not a session")
    assert replay(capsys, tmp_path) == (
        0,
        {
            "sessions": 3,
            "unfinished": 1,
            "text_only": 0,
            "calls": 12,
            "trajectories": 6,
            "forks": 3,
            "sampled_tokens": 18,
            "trainable_tokens": 15,
            "dropped": {"superseded": 3},
            "digests_compared": 1,
            "digest_mismatches": 0,
            "rows_compared": 0,
            "row_mismatches": 0,
            "steps_compared": 0,
            "step_mismatches": 0,
            "trained_tokens": 0,
            "broken_laws": 0,
            "unreadable": 0,
        },
        "",
    )


def test_one_file_with_the_other_builder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl")
    status, report, _ = replay(capsys, tmp_path / "a.jsonl", "--builder", "per_request")
    assert status == 0
    assert (report["sessions"], report["trajectories"], report["trainable_tokens"]) == (1, 3, 5)


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_a_digest_is_compared_with_the_builder_that_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], builder: str
) -> None:
    trained = digest(build_per_request(build_rollout("a")).trajectories)
    write(tmp_path / "a.jsonl", trajectory_digest=trained, builder="per_request")
    status, report, _ = replay(capsys, tmp_path / "a.jsonl", "--builder", builder)
    assert (status, report["digests_compared"], report["digest_mismatches"]) == (0, 1, 0)


def test_an_altered_record_is_a_mismatch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = digest(build_prefix_merged(build_rollout("a")).trajectories)
    path = tmp_path / "sessions" / "a.jsonl"
    write(path, trajectory_digest=good)
    text = path.read_text()
    path.write_text(text.replace('"logprobs":[-0.5,-0.5]', '"logprobs":[-0.5,-0.50001]', 1))
    status, report, err = replay(capsys, tmp_path)
    assert (status, report["digest_mismatches"], report["sessions"]) == (1, 1, 1)
    assert err.startswith(f"polar-trl: {path}: trained on trajectories {good}, the record gives ")
    assert err.count("\n") == 1


def test_an_unreadable_session_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "sessions" / "a.jsonl")
    write(tmp_path / "sessions" / "b.jsonl", trajectory_digest="x", builder="magic")
    bad = tmp_path / "sessions" / "0.jsonl"
    bad.write_text("{}\n")
    status, report, err = replay(capsys, tmp_path)
    assert (status, report["unreadable"], report["digests_compared"]) == (1, 2, 0)
    assert err.splitlines()[0] == f"polar-trl: {bad}, line 1: 'type' is missing"
    assert "unknown builder 'magic', known are ['per_request', 'prefix_merging']" in err.splitlines()[1]


ROWS: list[dict[str, Any]] = [
    {"calls": [0, 1], "num_tokens": 5, "num_trainable": 3, "trained": [[1, 3], [4, 5]], "logprobs": [-0.5] * 3},
    {"calls": [3], "num_tokens": 3, "num_trainable": 2, "trained": [[1, 3]], "logprobs": [-0.5] * 2},
]


def write_trained_run(folder: Path, **change: Any) -> Path:
    """A step that trained both trajectories of a session; `change` is laid over the first row. Its file of rows."""
    write(folder / "sessions" / "one" / "train_00000" / "a.jsonl")
    rows = folder / "rows" / "one" / "train_00001.jsonl"
    rows.parent.mkdir(parents=True)
    common = {"type": "row", "step": 1, "rollout": "a", "record": "sessions/one/train_00000/a.jsonl"}
    lines = [{"type": "rollout", "rollout": "a"}, {**common, **ROWS[0], **change}, {**common, **ROWS[1]}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"type":"row","st')
    steps = [
        {"step": 1, "rollouts": ["a"], "rows": 2, "tokens": 5},
        {"step": 2, "rollouts": [], "rows": 0, "tokens": 0},
    ]
    (folder / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return rows


def test_trained_rows_are_held_against_their_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_trained_run(tmp_path)
    names = ("rows_compared", "row_mismatches", "steps_compared", "step_mismatches", "trained_tokens")
    status, report, err = replay(capsys, tmp_path)
    assert (status, [report[name] for name in names], err) == (0, [2, 0, 2, 0, 5], "")
    # a resumed run trained them again, and the session was trained in another step that a kill undid
    (tmp_path / "rows" / "two").mkdir()
    (tmp_path / "rows" / "two" / rows.name).write_text(rows.read_text().replace('"step": 1', '"step": 7') + "\n")
    (tmp_path / "rows" / "three").mkdir()
    (tmp_path / "rows" / "three" / rows.name).write_text(rows.read_text())
    # and it began from a checkpoint of another folder
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write('{"step": 3, "rollouts": ["b"], "rows": 1, "tokens": 9}\n')
    status, report, err = replay(capsys, tmp_path)
    assert (status, report["unreadable"]) == (1, 1) and err.startswith(
        f"polar-trl: {tmp_path}/rows/two/{rows.name}, line 4"
    )
    assert [report[name] for name in names] == [6, 0, 2, 0, 5]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"record": "sessions/b.jsonl"}, "step 1 trained sessions/b.jsonl, which is gone"),
        ({"calls": [0, 4]}, "calls [0, 4], and it has 4"),
        ({"calls": [0]}, "5 tokens up to call 0, and it gives 3"),
        ({"trained": [[1, 3], [3, 4]]}, "tokens 3 to 4, and it says that not all of them were sampled"),
        ({"logprobs": [-0.5] * 2}, "its spans, its count and its log-probabilities are not of one length"),
        ({"trained": None}, "no row: TypeError"),
        ({"rollout": "b", "trained": [[1, 2]], "num_trainable": 1, "logprobs": [-0.5]}, "rows/ has 2 of 1"),
        ({"step": 3}, "step 1 trained 5 tokens of 1 rollouts, rows/ has 2 of 1"),
    ],
)
def test_a_row_that_is_not_its_session_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], fault: str
) -> None:
    write_trained_run(tmp_path, **change)
    status, _, err = replay(capsys, tmp_path)
    assert status == 1
    assert fault in err


def test_trained_sessions_that_lost_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trained_run(tmp_path)
    record = tmp_path / "sessions" / "one" / "train_00000" / "a.jsonl"
    write(tmp_path / "sessions" / "one" / "train_00000" / "b.jsonl")
    lines = record.read_text().splitlines(keepends=True)
    for text, fault in (("".join(lines[:-1]), "which has lost its end"), ("{}\n", "which cannot be read")):
        record.write_text(text)
        status, report, err = replay(capsys, tmp_path)
        assert (status, report["row_mismatches"]) == (1, 2)
        assert err.count(fault) == 2
    record.unlink()
    status, report, err = replay(capsys, tmp_path)
    assert (status, report["row_mismatches"]) == (1, 2) and err.count("which is gone") == 2
    (tmp_path / "trained.jsonl").write_text('{"step": 1}\n[]\n')
    assert replay(capsys, tmp_path)[1]["unreadable"] == 2


def test_text_without_token_ids_is_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (call, *_) = build_rollout("a").calls
    text = replace(call, prompt_ids=(), completion=Completion(token_ids=(), logprobs=(), finish_reason="stop"))
    calls = {"a": [replace(text, text_only=True)], "b": [replace(text, text_only=True), replace(call, index=1)]}
    for name, kept in calls.items():
        log = SessionLog(session_id=name, task_id="t", group_id="g", path=tmp_path / "sessions" / f"{name}.jsonl")
        for one in kept:
            log.append(replace(one, session_id=name))
        status, report, err = replay(capsys, tmp_path)
        assert (status, report["text_only"], report["broken_laws"]) == (int(name == "b"), 1, int(name == "b"))
    assert "b.jsonl: rollout b: calls [0] came as text" in err


def build_lossy(rollout: Rollout) -> Reconstruction:
    """A builder with the fault that the laws are there for: it forgets what does not fit on the first trajectory."""
    merged = build_prefix_merged(rollout)
    return replace(merged, trajectories=merged.trajectories[:1])


def test_a_broken_law_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar_trl.tools.replay.BUILDERS", {"prefix_merging": build_lossy})
    write(tmp_path / "a.jsonl")
    status, report, err = replay(capsys, tmp_path / "a.jsonl")
    assert (status, report["broken_laws"]) == (1, 1)
    assert "rollout a: 6 tokens were sampled, but 3 trained + 1 dropped" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "reason"), [("none", "no such file or folder"), ("empty", "no sessions; a run folder holds them")]
)
def test_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str) -> None:
    (tmp_path / "empty" / "sessions").mkdir(parents=True)
    status, report, err = replay(capsys, tmp_path / name)
    assert (status, report) == (2, {})
    assert err.startswith(f"polar-trl: {tmp_path / name}: {reason}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("args", [[], ["replay"], ["replay", "x", "--builder", "magic"], ["other"]])
def test_bad_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: polar-trl" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", "--help"])
    assert caught.value.code == 0
    assert "polar-trl replay runs/first --builder per_request --json" in capsys.readouterr().out


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl")
    assert main(["replay", str(tmp_path / "a.jsonl")]) == 0
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in capsys.readouterr().out.splitlines()]
    assert ["trainable tokens", "5"] in rows
    assert ["dropped tokens, superseded", "1"] in rows


def test_as_a_command_it_loads_nothing_heavy(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    code = (
        "import sys, polar_trl.cli as c; status = c.main(sys.argv[1:]); print(sorted(sys.modules)); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "replay", str(tmp_path / "a.jsonl"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report, modules = done.stdout.splitlines()
    assert json.loads(report)["sessions"] == 1
    assert not {"torch", "trl", "vllm", "transformers", "rich"} & set(json.loads(modules.replace("'", '"')))


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("NaN", "broken_laws", "sampled token 1 has log-probability nan"),
        ("-Infinity", "broken_laws", "sampled token 1 has log-probability -inf"),
        ("0.5", "broken_laws", "sampled token 1 has log-probability 0.5"),
        ("null", "unreadable", "log-probabilities that are not numbers"),
    ],
)
def test_a_log_probability_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, kind: str, said: str
) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    text = path.read_text()
    assert '"logprobs":[-0.5,-0.5]' in text
    path.write_text(text.replace('"logprobs":[-0.5,-0.5]', f'"logprobs":[-0.5,{value}]', 1))
    status, report, err = replay(capsys, path)
    assert status == 1 and report[kind] == 1
    assert said in err


@pytest.mark.parametrize("steps", [(1, 3), (2,), (1, 1), (1, 2, 1, 2)])
def test_a_step_that_is_missing_or_there_twice_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: tuple[int, ...]
) -> None:
    """A line was lost, or two processes wrote into one folder."""
    write_trained_run(tmp_path)
    lines = [json.dumps({"step": step, "rollouts": [], "rows": 0, "tokens": 0}) + "\n" for step in steps]
    (tmp_path / "trained.jsonl").write_text("".join(lines))
    status, report, err = replay(capsys, tmp_path)
    assert status == 1 and report["step_mismatches"] == 1
    assert " where step " in err
