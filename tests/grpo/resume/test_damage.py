"""Damaged files of a run: the older checkpoint is taken with one warning that names the file, never a traceback."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.trained_log import rewind_trained
from polar_trl.grpo.resume.checkpoint import (
    RankState,
    RunState,
    begin_checkpoint,
    choose_checkpoint,
    choose_start,
    find_problem,
    finish_checkpoint,
    load_state,
    save_rank_state,
)
from polar_trl.run_folder import append_lines, read_log

FILES = ("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "polar_rank0.pt")


def build_state(step: int) -> RunState:
    return RunState(
        step=step, micro_step=2 * step, epochs=1, num_batches=5, policy_version=4, seconds=2.5, settings={"seed": 1}
    )


def write_checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    begin_checkpoint(folder)
    for number, name in enumerate(FILES[:-1]):
        (folder / name).write_bytes(np.random.default_rng(number).bytes(70_000))
    save_rank_state(folder, 0, RankState())
    finish_checkpoint(folder, build_state(step))
    return folder


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGES: tuple[Callable[[Path], None], ...] = (
    *(cut, fill_with_zeros, flip_a_bit, make_folder, make_pipe, make_link_to_itself, Path.unlink),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_older_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    two, four = (write_checkpoint(tmp_path, step) for step in (2, 4))
    assert choose_start(tmp_path, "auto") == four
    damage(four / name)
    assert choose_start(tmp_path, "auto") == two
    (said,) = caplog.records
    assert f"{four} " in said.getMessage() and name in said.getMessage()
    with pytest.raises(ConfigError, match=rf"checkpoint-4 (has|lacks) {name}.*; the newest complete one is .*-2$"):
        choose_checkpoint(tmp_path, str(four))
    # the next process writes the same step again, whatever lies there
    write_checkpoint(tmp_path, 4)
    assert choose_start(tmp_path, "auto") == four


STATES: tuple[bytes, ...] = (
    *(b"", b"\0" * 1200, b"[]", b"null", b"4", b"{", b"\xff\xfe{}", b"[" * 100_000, b"{}"),
    *(b'{"version": "2"}', b'{"version": true}', b'{"version": 2}', b'{"version": 2, "is_resumable": true}'),
)


@pytest.mark.parametrize("state", STATES)
def test_a_damaged_state_is_named_and_the_older_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: bytes
) -> None:
    two, four = (write_checkpoint(tmp_path, step) for step in (2, 4))
    (four / "polar_state.json").write_bytes(state)
    assert choose_start(tmp_path, "auto") == two
    (said,) = caplog.records
    assert f"{four} has a damaged polar_state.json (" in said.getMessage()
    with pytest.raises(ConfigError, match=r"checkpoint-4 has a damaged polar_state.json \("):
        choose_checkpoint(tmp_path, str(four))
    write_checkpoint(tmp_path, 4)
    assert choose_start(tmp_path, "auto") == four


@pytest.mark.parametrize(
    "change",
    [
        *({"step": "4"}, {"step": None}, {"micro_step": 1.5}, {"seconds": float("nan")}, {"seconds": "1"}),
        *({"settings": []}, {"files": []}, {"files": {"model.safetensors": "x"}}, {"is_resumable": "yes"}),
        *({"step": 3}, {"files": {"../checkpoint-2/nothing": 1}}),
    ],
)
def test_a_state_with_values_of_another_kind(tmp_path: Path, change: dict[str, object]) -> None:
    two, four = (write_checkpoint(tmp_path, step) for step in (2, 4))
    content = json.loads((four / "polar_state.json").read_text())
    (four / "polar_state.json").write_text(json.dumps(content | change))
    assert choose_start(tmp_path, "auto") == two


def test_where_none_is_whole_the_run_begins_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4):
        flip_a_bit(write_checkpoint(tmp_path, step) / "optimizer.pt")
    assert choose_start(tmp_path, "auto") is None
    assert [
        f"checkpoint-{step} has optimizer.pt" in record.getMessage()
        for step, record in zip((4, 2), caplog.records, strict=True)
    ]
    with pytest.raises(ConfigError, match="holds a run already"):
        choose_start(tmp_path, None)


def test_a_copy_under_another_step_is_not_taken_for_ever_after(tmp_path: Path) -> None:
    four = write_checkpoint(tmp_path, 4)
    shutil.copytree(four, tmp_path / "checkpoint-999999999999")
    assert choose_start(tmp_path, "auto") == four
    assert find_problem(tmp_path / "checkpoint-999999999999") == "is named so and holds step 4"
    # kept elsewhere under a name of its own, it is a checkpoint like any other
    shutil.copytree(four, tmp_path / "kept" / "best")
    assert choose_checkpoint(tmp_path / "new", str(tmp_path / "kept" / "best")) == tmp_path / "kept" / "best"


def test_a_file_with_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    (tmp_path / "checkpoint-4").write_text("x")
    with pytest.raises(ConfigError, match="checkpoint-4 is no folder, and a checkpoint would have to be one: move"):
        choose_start(tmp_path, "auto")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02junk", {"odd": 1}, [1]])
def test_a_rank_s_file_that_was_written_wrongly(tmp_path: Path, content: object) -> None:
    folder = tmp_path / "checkpoint-1"
    begin_checkpoint(folder)
    if isinstance(content, bytes):
        (folder / "polar_rank0.pt").write_bytes(content)
    else:
        torch.save(content, folder / "polar_rank0.pt")
    finish_checkpoint(folder, build_state(1))
    with pytest.raises(ConfigError, match=r"polar_rank0.pt holds no state of a rank \("):
        load_state(folder, 0, torch.device("cpu"))


def write_trained(run: Path, steps: int = 4) -> list[bytes]:
    lines = [json.dumps({"step": step, "rollouts": [f"r{step}"]}).encode() + b"\n" for step in range(1, steps + 1)]
    (run / "trained.jsonl").write_bytes(b"".join(lines))
    return lines


JUNK = (
    b"\0" * 50,
    b"\xff\xfe",
    b"[]",
    b"null",
    b"{}",
    b'{"step": NaN}',
    b'{"step": "2"}',
    b"[" * 100_000,
    b"{",
    b"\r",
)


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_damaged_line_of_trained_moves_to_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, junk: bytes, place: int
) -> None:
    lines = write_trained(tmp_path)
    (tmp_path / "trained.jsonl").write_bytes(b"".join([*lines[:place], junk + b"\n", *lines[place:]]))
    rewind_trained(tmp_path, source=tmp_path, step=2)
    assert (tmp_path / "trained.jsonl").read_bytes() == b"".join(lines[:2])
    assert sorted((tmp_path / "lost.jsonl").read_bytes().splitlines(keepends=True)) == sorted(
        [junk + b"\n", *lines[2:]]
    )
    (said,) = caplog.records
    assert f"{tmp_path / 'trained.jsonl'}: no line of a step" in said.getMessage()


@pytest.mark.parametrize("damage", ["gone", "replaced", "cut"])
def test_lines_that_are_missing_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    lines = write_trained(tmp_path)
    path = tmp_path / "trained.jsonl"
    path.unlink() if damage == "gone" else path.write_bytes(
        lines[0] + (b"\0" if damage == "replaced" else lines[1][:-5])
    )
    rewind_trained(tmp_path, source=tmp_path, step=2)
    assert f"trained.jsonl lacks {2 if damage == 'gone' else 1} of the 2 steps" in caplog.records[-1].getMessage()


def test_a_line_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    lines = write_trained(tmp_path)
    (tmp_path / "trained.jsonl").write_bytes(b"".join(lines * 2))
    rewind_trained(tmp_path, source=tmp_path, step=4)
    assert (tmp_path / "trained.jsonl").read_bytes() == b"".join(lines)


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_lines(path, b'{"step": 1}\n')
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    append_lines(path, b'{"step": 3}\n')
    assert [line["step"] for line in read_log(tmp_path)] == [1, 3]
