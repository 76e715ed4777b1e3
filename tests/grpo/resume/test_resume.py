"""Killed with SIGKILL in a rollout, in training and in the writing of a checkpoint, a run goes on as if it were not.

One run is killed at each of the three moments in turn and started again by the same command; another one with the
same settings is left alone. A generation batch feeds two optimizer steps and checkpoints come after every third, so
that one of them falls between the two.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ROOT, WORKERS
from resume_runs import (
    ENVIRONMENT,
    Start,
    find_processes,
    finish,
    finish_with_error,
    kill_at,
    kill_workers,
    list_sandboxes,
    read_lines,
    read_logs,
    start_worker,
    wait_for,
)
from safetensors.torch import load_file

from polar_trl.grpo.resume.checkpoint import (
    GO_ON,
    find_checkpoint,
    find_problem,
    list_checkpoints,
)
from polar_trl.recording.log import read_record

MAX_STEPS = 10


@dataclass
class Run:
    out: Path
    result: dict[str, Any]
    starts: tuple[Start, ...] = ()


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("whole")
    return Run(out, finish(tiny_model, out))


@pytest.fixture(scope="module")
def killed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("killed")
    starts = (
        kill_at(tiny_model, out, "rollout", 4),  # goes on from 3, between two steps of one generation batch
        kill_at(tiny_model, out, "training", 7),  # goes on from 6
        kill_at(tiny_model, out, "checkpoint", 9),  # goes on from 6 again
    )
    return Run(out, finish(tiny_model, out), starts)


def require_equal_weights(out: Path, num_ranks: int) -> None:
    sums = [json.loads(path.read_text()) for path in out.glob("weights-*.json")]
    assert sums == pytest.approx([sums[0]] * num_ranks, rel=1e-9)


def read_sessions(run: Run) -> dict[str, list[Any]]:
    """Return the records by rollout id."""
    records = defaultdict(list)
    for path in run.out.glob("sessions/*/train_*/*.jsonl"):
        records[path.stem].append(read_record(path))
    return records


def read_order(run: Run) -> list[tuple[int, list[tuple[str, str]]]]:
    """Return each step with the task and place within its group of every rollout that it trained."""
    sessions = read_sessions(run)
    return [
        (line["step"], [(sessions[i][0].rollout.task_id, i.rsplit("-", 1)[1]) for i in line["rollouts"]])
        for line in read_lines(run.out / "trained.jsonl")
    ]


@pytest.mark.timeout(600)
def test_each_kill_met_its_moment(killed: Run) -> None:
    in_rollout, in_training, in_checkpoint = killed.starts
    assert in_rollout.agents_alive >= 4
    assert in_rollout.sandboxes >= 4
    assert in_rollout.trained_steps == (1, 2, 3, 4)
    assert in_rollout.partial == ()
    # step 8's gradients were there, its update was not made
    assert in_training.trained_steps == (1, 2, 3, 4, 5, 6, 7)
    assert in_training.partial == ()
    assert in_checkpoint.trained_steps == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert in_checkpoint.partial == ("checkpoint-9",)


@pytest.mark.timeout(600)
def test_each_start_is_in_the_settings(killed: Run) -> None:
    starts = json.loads((killed.out / "settings.json").read_text())["starts"]
    assert [start["first_step"] for start in starts] == [1, 4, 7, 7]
    assert [start["ended"] is None for start in starts] == [True, True, True, False]


def test_tasks_come_in_the_order_of_a_run_that_was_not_killed(killed: Run, whole: Run) -> None:
    order = read_order(whole)
    assert [step for step, _ in order] == list(range(1, MAX_STEPS + 1))
    assert read_order(killed) == order
    # into the third epoch, and shuffled anew in each: this would not hold for any order
    epochs = [{task for _, rows in order[i : i + 4] for task, _ in rows} for i in (0, 4)]
    assert all(len(tasks) == 4 for tasks in epochs)
    assert [rows for _, rows in order[2:4]] != [rows for _, rows in order[6:8]]


@pytest.mark.timeout(600)
def test_no_session_is_trained_twice_and_none_that_was_lost_is_missing_from_the_records(killed: Run) -> None:
    trained = [i for line in read_lines(killed.out / "trained.jsonl") for i in line["rollouts"]]
    assert len(trained) == len(set(trained)) == 2 * MAX_STEPS
    sessions = read_sessions(killed)
    # an id is one session, in whichever process it ran
    assert all(len(records) == 1 for records in sessions.values())
    lost = read_lines(killed.out / "lost.jsonl")
    assert [line["step"] for line in lost] == [4, 7, 7, 8, 9]
    # the first of these was rolled out before the checkpoint: it was made again from the rows in there
    assert lost[0] == read_lines(killed.out / "trained.jsonl")[3]
    assert not set(trained) & {i for line in lost[1:] for i in line["rollouts"]}
    for line in [*lost, *read_lines(killed.out / "trained.jsonl")]:
        assert line["tokens"] == sum(
            len(call.completion.token_ids) for i in line["rollouts"] for call in sessions[i][0].rollout.calls
        )
    # those that were killed in mid-session have kept what they had
    torn = [records[0].rollout for records in sessions.values() if not records[0].finished]
    assert [len(rollout.calls) for rollout in torn] == [1, 1, 1, 1]
    assert not {rollout.id for rollout in torn} & set(trained)


@pytest.mark.timeout(600)
def test_rows_that_were_rolled_out_and_not_trained_are_in_the_checkpoint(killed: Run) -> None:
    step_3, step_4 = read_lines(killed.out / "trained.jsonl")[2:4]
    assert {i[:11] for i in step_3["rollouts"] + step_4["rollouts"]} == {"train-00001"}
    attempts = sorted(killed.out.glob("sessions/*"))
    batches = [sorted(path.name for path in attempt.iterdir()) for attempt in attempts]
    # the second process trained step 4 without rolling out; numbers that were lost stay taken
    assert batches == [
        ["train_00000", "train_00001", "train_00002"],
        ["train_00003", "train_00004"],
        ["train_00005", "train_00006"],
        ["train_00007", "train_00008"],
    ]


@pytest.mark.timeout(600)
def test_weights_optimizer_schedule_and_versions_go_on(killed: Run, whole: Run) -> None:
    checkpoint = load_file(killed.out / "checkpoint-6" / "model.safetensors")
    weights = sum(tensor.double().sum().item() for tensor in checkpoint.values())
    assert killed.result["weights_at_start"] == pytest.approx(weights, rel=1e-12)
    optimizer = torch.load(killed.out / f"checkpoint-{MAX_STEPS}" / "optimizer.pt", weights_only=True)
    assert {int(state["step"]) for state in optimizer["state"].values()} == {MAX_STEPS}
    for key in ("step", "learning_rate", "epoch"):
        logged = [entry[key] for entry in killed.result["log"] if "learning_rate" in entry]
        assert logged == [entry[key] for entry in whole.result["log"] if "learning_rate" in entry], key
        assert len(logged) == MAX_STEPS
    # weights are pushed before every generation batch: tokens of step 2n + 1 and 2n + 2 have version n + 1
    for run in (killed, whole):
        sessions = read_sessions(run)
        versions = [
            {call.completion.first_policy_version for i in line["rollouts"] for call in sessions[i][0].rollout.calls}
            for line in read_lines(run.out / "trained.jsonl")
        ]
        assert versions == [{1}, {1}, {2}, {2}, {3}, {3}, {4}, {4}, {5}, {5}]
    assert killed.result["seconds_before"] > 0.5
    assert whole.result["seconds_before"] == 0.0


@pytest.mark.timeout(600)
def test_nothing_is_left_of_the_killed_processes(killed: Run) -> None:
    assert find_processes(killed.out) == []
    assert list_sandboxes(killed.out) == []
    assert list(killed.out.glob("tmp/polar-trl-*/*")) == []
    assert not list(killed.out.glob("removed-*"))
    assert [folder.name for _, folder in list_checkpoints(killed.out)] == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-9",
        "checkpoint-10",
    ]
    assert all(find_problem(folder) is None for _, folder in list_checkpoints(killed.out))


@pytest.mark.timeout(600)
def test_two_processes_go_on_together(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"save_steps": 1, "max_steps": 3}
    start = kill_at(tiny_model, tmp_path, "checkpoint", 2, processes=2, **settings)
    assert start.trained_steps == (1, 2)
    assert start.partial == ("checkpoint-2",)
    result = finish(tiny_model, tmp_path, processes=2, **settings)
    assert [entry["step"] for entry in result["log"] if "learning_rate" in entry] == [1, 2, 3]
    steps = [line["rollouts"] for line in read_lines(tmp_path / "trained.jsonl")]
    # both ranks' rows of the batch that was rolled out before the kill, then a new one
    assert sorted(steps[0] + steps[1]) == [f"train-00000-g00{g}-r00{r}" for g in range(4) for r in range(2)]
    assert {i[:11] for i in steps[2]} == {"train-00001"}
    assert [line["rollouts"] for line in read_lines(tmp_path / "lost.jsonl")] == [steps[1]]
    for name in ("polar_rank0.pt", "polar_rank1.pt", "rng_state_0.pth", "rng_state_1.pth"):
        assert (tmp_path / "checkpoint-3" / name).is_file()
    require_equal_weights(tmp_path, 2)
    assert find_processes(tmp_path) == []


@pytest.mark.timeout(600)
def test_sigterm_says_how_to_go_on_and_the_folder_is_not_begun_in_again(tiny_model: Path, tmp_path: Path) -> None:
    tasks, run, config = tmp_path / "tasks.jsonl", tmp_path / "run", tmp_path / "run.yaml"
    tasks.write_text("".join(json.dumps({"id": f"t{i}", "instruction": f"task {i}: ok"}) + "\n" for i in range(2)))
    settings = {
        "tasks": str(tasks),
        "model_name_or_path": str(tiny_model),
        "output_dir": str(run),
        "agent_command": "python3 -I -S ~/counting_agent.py {instruction}",
        "grader": "test -s answer.txt",
        "agent_files": [str(WORKERS / "counting_agent.py")],
        "max_steps": 1000,
        "save_steps": 1,
        "save_total_limit": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 8,
        "report_to": "none",
        "vllm_max_model_length": 512,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    config.write_text(json.dumps(settings))  # which is YAML
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--config", str(config)]
    with (tmp_path / "log-train").open("wb") as log:
        train = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        wait_for(train, tmp_path, "run/checkpoint-3/polar_state.json", 1)
    finally:
        train.terminate()
    assert train.wait(timeout=60) == 1
    lines = (tmp_path / "log-train").read_text().splitlines()  # a progress bar follows, when it is closed
    (said,) = [line[line.index("train: ") :] for line in lines if "train: " in line]
    assert said.startswith("train: stopped at step ")
    newest = find_checkpoint(run)
    assert newest is not None
    assert said.endswith(f"; {GO_ON} goes on from {newest}")
    whole = [folder for _, folder in list_checkpoints(run) if find_problem(folder) is None]
    assert len(whole) in (2, 3)  # three if the signal came after a save and before the oldest was removed

    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert again.returncode == 1
    assert f"train: output_dir {run} holds a run already (" in again.stderr.strip().splitlines()[-1]
    (run / "summary.json").touch()
    over = ["--resume_from_checkpoint", "auto", "--max_steps", "3"]
    done = subprocess.run([*command, *over], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("made all of its 3 steps; set max_steps higher to go on")


def test_sessions_that_were_open_begin_anew(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "max_policy_lag": 1,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "max_steps": 4,
        "save_steps": 1,
        "max_agents": 8,
    }
    # in the second step: the first one began two batches of two groups and took two groups
    kill_at(tiny_model, tmp_path, "training", 1, **settings)
    saved = torch.load(tmp_path / "checkpoint-1" / "polar_rank0.pt", weights_only=True)
    assert len(saved["open_task_ids"]) == 4
    finish(tiny_model, tmp_path, **settings)
    lines = read_lines(tmp_path / "trained.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    ids = [rollout_id for line in lines for rollout_id in line["rollouts"]]
    assert len(ids) == len(set(ids)) == 16
    tasks = {path.stem: read_record(path).rollout.task_id for path in tmp_path.glob("sessions/*/*/*.jsonl")}
    for epoch in (lines[:2], lines[2:]):
        # two batches of an epoch: four tasks, both rollouts of each, whichever step took them
        trained = sorted(tasks[rollout_id] for line in epoch for rollout_id in line["rollouts"])
        assert len(set(trained)) == 4
        assert trained == sorted(2 * list(set(trained)))


@pytest.mark.parametrize("lag", [0, 1])
def test_agents_are_drawn_as_without_the_kill(tiny_model: Path, tmp_path: Path, lag: int) -> None:
    settings = {
        "agents": {"alpha": 1, "beta": 2, "gamma": 2},
        "max_policy_lag": lag,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 1,
        "max_steps": 4,
        "save_steps": 1,
    }
    played = []
    for name in ("whole", "killed"):
        out = tmp_path / name
        if name == "killed":
            kill_at(tiny_model, out, "training", 1, **settings)
        finish(tiny_model, out, **settings)
        rollouts = {path.stem: read_record(path).rollout for path in out.glob("sessions/*/*/*.jsonl")}
        steps = [
            Counter((rollouts[rollout_id].task_id, rollouts[rollout_id].agent) for rollout_id in line["rollouts"])
            for line in read_lines(out / "trained.jsonl")
        ]
        assert len(steps) == 4 and len({agent for step in steps for _, agent in step}) > 1
        # groups of a batch that began early may be taken in another order
        played.append(steps if lag == 0 else sum(steps, Counter()))
    assert played[0] == played[1]
    other = finish_with_error(tiny_model, tmp_path / "killed", **settings | {"agents": {"alpha": 1}, "max_steps": 5})
    assert "agents is {'alpha': 1.0} and was {'alpha': 1.0, 'beta': 2.0, 'gamma': 2.0} when the checkpoint" in other


@pytest.mark.timeout(600)
@pytest.mark.parametrize("only_rank", [None, 1])
def test_open_sessions_of_two_ranks_begin_anew(tiny_model: Path, tmp_path: Path, only_rank: int | None) -> None:
    """All of a run's processes are killed in mid-training, or one, while sessions of the next group are open.

    A step's only group lies on both ranks.
    """
    settings = {
        "max_policy_lag": 1,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 1,
        "num_generations": 4,
        "max_steps": 5,
        "save_steps": 1,
        "max_agents": 8,
    }
    kill_at(tiny_model, tmp_path, "training", 2, processes=2, only_rank=only_rank, **settings)
    saved = [
        torch.load(tmp_path / "checkpoint-2" / f"polar_rank{rank}.pt", weights_only=True)["open_task_ids"]
        for rank in (0, 1)
    ]
    # each rank's part of the one group that was open
    assert [len(task_ids) for task_ids in saved] == [2, 2]
    assert len({*saved[0], *saved[1]}) == 1
    finish(tiny_model, tmp_path, processes=2, **settings)
    assert find_processes(tmp_path) == []
    lines = read_lines(tmp_path / "trained.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    tasks = {path.stem: read_record(path).rollout.task_id for path in tmp_path.glob("sessions/*/*/*.jsonl")}
    # the five tasks of an epoch, each once with its four rollouts
    groups = [{tasks[rollout_id] for rollout_id in line["rollouts"]} for line in lines]
    assert [len(line["rollouts"]) for line in lines] == [4] * 5
    assert [len(group) for group in groups] == [1] * 5
    assert len(set.union(*groups)) == 5
    assert {*saved[0]} == groups[2] or {*saved[0]} == groups[3]
    require_equal_weights(tmp_path, 2)


@pytest.mark.timeout(600)
def test_groups_that_lie_across_three_ranks_begin_anew(tiny_model: Path, tmp_path: Path) -> None:
    """Two groups of three on three ranks: rank 1 has the last of one and the first of the other."""
    settings = {
        "max_policy_lag": 2,
        "per_device_train_batch_size": 2,
        "steps_per_generation": 1,
        "num_generations": 3,
        "max_steps": 4,
        "save_steps": 1,
        "max_agents": 1,
        "max_preparing": 1,
    }
    kill_at(tiny_model, tmp_path, "training", 2, processes=3, only_rank=0, **settings)
    finish(tiny_model, tmp_path, processes=3, **settings)
    assert find_processes(tmp_path) == []
    lines = read_lines(tmp_path / "trained.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    tasks = {path.stem: read_record(path).rollout.task_id for path in tmp_path.glob("sessions/*/*/*.jsonl")}
    ids = [rollout_id for line in lines for rollout_id in line["rollouts"]]
    assert len(ids) == len(set(ids)) == 24
    for line in lines:
        assert sorted(Counter(tasks[rollout_id] for rollout_id in line["rollouts"]).values()) == [3, 3]
    require_equal_weights(tmp_path, 3)


@pytest.mark.timeout(600)
def test_ctrl_c_on_two_ranks_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Pressed in a terminal, where the launcher and both ranks get it, while agents wait in mid-session."""
    settings = {"max_policy_lag": 1, "per_device_train_batch_size": 2, "steps_per_generation": 1, "max_agents": 2}
    worker = start_worker(tiny_model, tmp_path, "rollout", 1, settings, 2)
    try:
        wait_for(worker, tmp_path, "tmp/polar-trl-*/*/disk/work/waiting", 4)
        os.killpg(worker.pid, signal.SIGINT)
        assert worker.wait(timeout=120) != 0
        assert find_processes(tmp_path) == []
        assert list_sandboxes(tmp_path) == []
    finally:
        kill_workers(tmp_path)
        worker.wait()
    assert "KeyboardInterrupt" in read_logs(tmp_path)
