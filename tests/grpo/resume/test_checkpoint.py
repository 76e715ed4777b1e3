"""Checkpoint folders: which are whole, which may go, and what is read back from them. No engine runs here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polar_trl.cli.train import is_over
from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.logs.trained_log import rewind_trained
from polar_trl.grpo.packing.forward import pack_rows
from polar_trl.grpo.resume.checkpoint import (
    GO_ON,
    PART_FILE,
    STATE_FILE,
    RankState,
    RunState,
    begin_checkpoint,
    choose_checkpoint,
    choose_start,
    find_checkpoint,
    find_problem,
    finish_checkpoint,
    know_cpu_devices,
    list_checkpoints,
    load_state,
    remove_partial,
    require_same_settings,
    rotate_checkpoints,
    save_rank_state,
)
from polar_trl.grpo.resume.resume import describe_order, require_same_order
from polar_trl.grpo.run.finish import explain_resume

CPU = torch.device("cpu")


def build_state(step: int, **settings: Any) -> RunState:
    return RunState(
        step=step,
        micro_step=2 * step,
        epochs=1,
        num_batches=5,
        policy_version=4,
        seconds=2.5,
        settings=settings,
    )


def write_checkpoint(output_dir: Path, step: int, *, complete: bool = True, **kwargs: Any) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    begin_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "global").mkdir()
    (folder / "global" / "optimizer.pt").write_bytes(bytes(50))
    if complete:
        save_rank_state(folder, 0, RankState())
        finish_checkpoint(folder, build_state(step), **kwargs)
    return folder


def test_what_is_in_hand_is_read_back_to_the_bit(tmp_path: Path) -> None:
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 9])]
    scored = [np.array([False, True, False, True]), np.array([False, False, True])]
    packed = pack_rows(rows, scored, kind="tree", device=CPU)
    assert packed.layout.subtree_ends_L.tolist() == [5, 5, 4, 4, 5]  # a cache, which is not written
    rows = [{"rollout": "train-0", "calls": [0, 1], "trained": [(3, 5)], "num_trainable": 2, "advantage": 0.1}]
    passed = {"advantages": torch.tensor([0.1, -0.3]), "packed": packed, "rows": rows}
    folder = tmp_path / "checkpoint-3"
    begin_checkpoint(folder)
    save_rank_state(folder, 0, RankState(windows=[[passed], []], open_task_ids=["t"]))
    finish_checkpoint(folder, build_state(3, seed=42))
    know_cpu_devices()
    state, rank_state = load_state(folder, 0, torch.device("cpu", 0))
    assert state == build_state(3, seed=42)
    assert rank_state.open_task_ids == ["t"]
    ((read,), nothing) = rank_state.windows
    assert nothing == []
    assert read["rows"] == passed["rows"]
    assert torch.equal(read["advantages"], passed["advantages"])
    assert "subtree_ends_L" not in vars(read["packed"].layout)
    assert [read["packed"].layout.positions_of(row).tolist() for row in (0, 1)] == [[0, 1, 2, 3], [0, 1, 4]]
    for name in ("input_ids", "position_ids", "scored_positions", "labels", "row_of_S"):
        assert torch.equal(getattr(read["packed"], name), getattr(packed, name)), name
    with pytest.raises(ConfigError, match="was written by fewer processes: polar_rank1"):
        load_state(folder, 1, CPU)


def test_a_file_that_runs_code_is_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1, complete=False)
    torch.save({"windows": [Path("x")], "open_task_ids": []}, folder / "polar_rank0.pt")
    finish_checkpoint(folder, build_state(1))
    with pytest.raises(Exception, match="Unsupported global"):
        load_state(folder, 0, CPU)


def test_the_newest_complete_one_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint(tmp_path / "nothing") is None
    for step in (2, 4, 10):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 12, complete=False)
    (tmp_path / "checkpoint-14").mkdir()
    (tmp_path / "checkpoint-10" / "global" / "optimizer.pt").write_bytes(bytes(49))
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "checkpoint-12 was not written to its end" in said
    assert "checkpoint-14 holds no polar_state.json: it was not made by this trainer" in said
    assert "checkpoint-10 has global/optimizer.pt with 49 bytes, and it was written with 50" in said
    (tmp_path / "checkpoint-4" / "model.safetensors").unlink()
    assert find_problem(tmp_path / "checkpoint-4") == "lacks model.safetensors"
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_only_what_was_begun_here_and_not_finished_is_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 4, complete=False)
    (tmp_path / "checkpoint-6").mkdir()  # by something else
    (tmp_path / "removed-checkpoint-1").mkdir()  # killed while it was removed
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]


def test_a_checkpoint_that_is_written_again_counts_only_once_it_is_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 2)
    begin_checkpoint(folder)
    assert find_problem(folder) == "was not written to its end"
    assert (folder / PART_FILE).exists() and not (folder / STATE_FILE).exists()


def test_old_ones_go_only_when_newer_ones_are_whole(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    write_checkpoint(tmp_path, 8, complete=False)
    rotate_checkpoints(tmp_path, limit=None)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 4, 6, 8]
    rotate_checkpoints(tmp_path, limit=1, best=str(tmp_path / "checkpoint-2"))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2, 6, 8]
    rotate_checkpoints(tmp_path, limit=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6, 8]


def test_auto_does_not_begin_anew_beside_checkpoints_of_another_version(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 50)
    content = json.loads((folder / "polar_state.json").read_text())
    (folder / "polar_state.json").write_text(json.dumps(content | {"version": 1}))
    with pytest.raises(
        ConfigError, match="checkpoint-50 has version 1 of the format; this package reads version 2: na"
    ):
        choose_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize("wanted", ["auto", "AUTO", "true", True])
def test_auto_is_the_newest_or_a_new_run(tmp_path: Path, wanted: str | bool) -> None:
    assert choose_checkpoint(tmp_path, wanted) is None
    write_checkpoint(tmp_path, 2)
    assert choose_checkpoint(tmp_path, wanted) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("wanted", [None, False, "false", "none", ""])
def test_none_begins(tmp_path: Path, wanted: str | bool | None) -> None:
    write_checkpoint(tmp_path, 2)
    assert choose_checkpoint(tmp_path, wanted) is None


def test_a_path_is_checked(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    two, four = (write_checkpoint(run, step) for step in (2, 4))
    write_checkpoint(run, 6, complete=False)
    assert choose_checkpoint(run, str(four)) == four
    assert choose_checkpoint(other, str(two)) == two  # a new run that branches off
    with pytest.raises(ConfigError, match=r"checkpoint-5 is no folder; the newest complete one is .*checkpoint-4"):
        choose_checkpoint(run, str(run / "checkpoint-5"))
    (run / "checkpoint-6").rename(tmp_path / "checkpoint-6")
    with pytest.raises(ConfigError, match="checkpoint-6 was not written to its end"):
        choose_checkpoint(run, str(tmp_path / "checkpoint-6"))
    with pytest.raises(ConfigError, match="holds checkpoint-4, which is newer than checkpoint-2"):
        choose_checkpoint(run, str(two))
    eight = write_checkpoint(other, 8)
    with pytest.raises(ConfigError, match="checkpoint-8 is of another run than those in"):
        choose_checkpoint(run, str(eight))
    model_only = write_checkpoint(other, 9, is_resumable=False)
    with pytest.raises(ConfigError, match="checkpoint-9 was saved with save_only_model: it holds no optimizer"):
        choose_checkpoint(other, str(model_only))


def test_a_setting_that_the_order_hangs_on_must_stay() -> None:
    require_same_settings({"seed": 42, "num_generations": 8}, {"seed": 42, "num_generations": 8})
    with pytest.raises(ConfigError, match="num_generations is 4 and was 8 when the checkpoint was written"):
        require_same_settings({"seed": 42, "num_generations": 8}, {"seed": 42, "num_generations": 4})


def test_another_order_of_tasks_is_noticed_before_anything_is_loaded(tmp_path: Path) -> None:
    args = PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, resume_from_checkpoint="auto")
    require_same_order(tmp_path, args, ["a", "b"])  # no checkpoint: the run begins
    folder = tmp_path / "checkpoint-2"
    begin_checkpoint(folder)
    save_rank_state(folder, 0, RankState())
    finish_checkpoint(folder, build_state(2, **describe_order(args, ["a", "b"])))
    require_same_order(tmp_path, args, ["a", "b"])
    with pytest.raises(ConfigError, match=r"tasks is '.*' and was '.*' when the checkpoint was written"):
        require_same_order(tmp_path, args, ["b", "a"])


@pytest.mark.parametrize("name", ["checkpoint-2", "trained.jsonl", "summary.json"])
def test_a_folder_that_holds_a_run_is_not_begun_in(tmp_path: Path, name: str) -> None:
    run, other = tmp_path / "run", write_checkpoint(tmp_path / "other", 2)
    run.mkdir()
    (run / "notes.txt").touch()
    assert choose_start(run, None) is None
    assert choose_start(run, str(other)) == other
    (run / name).mkdir()
    said = rf"holds a run already \({name}\): .*--resume_from_checkpoint auto .*train\(resume_from_checkpoint=.auto"
    if name == "summary.json":
        said = "holds a run that is over and has no checkpoint to go on from; name another output_dir"
    for wanted in (None, *([] if name == "checkpoint-2" else [str(other)])):
        with pytest.raises(ConfigError, match=said):
            choose_start(run, wanted)
    if name == "summary.json":
        with pytest.raises(
            ConfigError, match="holds a run that is over and has no checkpoint to go on from; name ano"
        ):
            choose_start(run, "auto")
    else:
        assert choose_start(run, "auto") is None
    four = write_checkpoint(run, 4)
    assert choose_start(run, "auto") == choose_start(run, str(four)) == four


@pytest.mark.parametrize("wanted", [None, "auto", True])
def test_a_run_of_models_alone_is_not_begun_again_in_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: str | bool | None
) -> None:
    write_checkpoint(tmp_path, 2, is_resumable=False)
    said = (
        "holds a run that cannot be gone on with: checkpoint-2 was saved with save_only_model, without the optimizer"
    )
    with pytest.raises(ConfigError, match=f"^output_dir {tmp_path} {said}; name another output_dir$"):
        choose_start(tmp_path, wanted)
    assert explain_resume(tmp_path) == f"{tmp_path} {said}"
    assert caplog.records == []  # no older one is looked for
    one = write_checkpoint(tmp_path, 1)
    assert choose_start(tmp_path, "auto") == one
    assert explain_resume(tmp_path) == f"{GO_ON} goes on from {one}"


def test_a_run_is_over_when_its_steps_are_made_whatever_was_saved(tmp_path: Path) -> None:
    args = PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=2)
    (tmp_path / "trained.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert not is_over(args)
    (tmp_path / "summary.json").touch()
    assert is_over(args)
    write_checkpoint(tmp_path, 2, is_resumable=False)
    assert is_over(args)
    args.max_steps = 3
    assert not is_over(args)
    args.max_steps = 2
    write_checkpoint(tmp_path, 1)  # the summary is of an earlier end
    assert not is_over(args)


def test_sessions_of_a_start_that_made_no_step_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    (tmp_path / "rows").mkdir()
    assert choose_start(tmp_path, None) is None


def test_trained_lists_what_the_weights_have_seen(tmp_path: Path) -> None:
    def write(folder: Path, name: str, *steps: str) -> None:
        (folder / name).write_text("".join(f'{{"step": {step[0]}, "rollouts": ["{step}"]}}\n' for step in steps))

    def read(folder: Path, name: str) -> list[str]:
        return [json.loads(line)["rollouts"][0] for line in (folder / name).read_text().splitlines()]

    write(tmp_path, "trained.jsonl", "1a", "2a", "3a", "4a")
    write(tmp_path, "lost.jsonl", "3a")  # a kill between the two writes
    with (tmp_path / "trained.jsonl").open("a") as file:
        file.write('{"step": 5, "roll')  # and one in a line
    rewind_trained(tmp_path, source=tmp_path, step=2)
    assert read(tmp_path, "trained.jsonl") == ["1a", "2a"]
    assert read(tmp_path, "lost.jsonl") == ["3a", "4a"]
    branch = tmp_path / "branch"
    rewind_trained(branch, source=tmp_path, step=1)
    assert read(branch, "trained.jsonl") == ["1a"]
    rewind_trained(tmp_path, source=tmp_path, step=0)
    assert read(tmp_path, "trained.jsonl") == []
    assert read(tmp_path, "lost.jsonl") == ["3a", "4a", "1a", "2a"]
