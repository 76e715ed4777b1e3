"""Real runs of the trainer: vLLM's CPU build, TRL, a tiny random model, and agents that are processes of their own."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import trl
from launch import run_worker
from records import read_session

from polar_trl.cli import main as polar_trl
from polar_trl.reconstruct import build_prefix_merged
from polar_trl.run_folder import read_log
from polar_trl.types import Rollout


def load(out: Path) -> dict[str, Any]:
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two healthy tasks."""
    out = tmp_path_factory.mktemp("run")
    run_worker("train_worker.py", str(tiny_model), str(out), "ok,ok,fork,ok,ok,ok")
    return out


@pytest.fixture(scope="module")
def troubled_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which everything that can go wrong with one session does."""
    out = tmp_path_factory.mktemp("troubled")
    run_worker("train_worker.py", str(tiny_model), str(out), "die,grader_raises,sleep,silent,ok,die")
    return out


def steps(out: Path) -> list[dict[str, Any]]:
    return [entry for entry in load(out)["log"] if "reward" in entry]


def rollouts(out: Path) -> list[Any]:
    return [read_session(path) for path in sorted(out.glob("sessions/**/*.jsonl"))]


def test_three_steps_move_the_weights_and_the_engine_follows(run: Path) -> None:
    result = load(run)
    assert len(steps(run)) == 3
    assert result["moved"] > 1e-4
    # one push a step, and one after the last
    assert result["policy_version"] == 4
    assert result["num_greedy_tokens"] >= 4
    assert result["greedy_is_argmax"]
    assert result["greedy_gap_max"] < 1e-4  # float32


def test_every_step_is_logged(run: Path) -> None:
    for entry in steps(run):
        assert entry["polar/sampled_tokens"] == entry["polar/trained_tokens"] > 0
        assert entry["polar/calls_per_rollout"] == 3
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert 0 <= entry["frac_reward_zero_std"] <= 1
        parts = ("weight_sync", "wake", "rollouts", "sleep", "planning", "training", "optimizer")
        seconds = {name: entry[f"polar/phase/{name}_s"] for name in parts}
        assert seconds["rollouts"] > 0 and seconds["training"] > 0
        assert sum(seconds.values()) <= entry["polar/phase/step_s"]
        useful = seconds["rollouts"] + seconds["training"] + seconds["optimizer"]
        assert entry["polar/phase/overhead_share"] == pytest.approx(1 - useful / entry["polar/phase/step_s"])
        assert entry["polar/seconds/agent"] > 0
        assert entry["rewards/grader/mean"] == entry["reward"]
        assert entry["polar/rollouts_without_reward"] == 0


def test_nothing_of_a_session_is_in_memory_after_its_step(run: Path) -> None:
    assert load(run)["held"] == [0, 0, 0]


def test_the_log_is_on_the_disk_line_by_line(run: Path) -> None:
    assert [line["step"] for line in read_log(run) if "reward" in line] == [1, 2, 3]
    assert [line["reward"] for line in read_log(run) if "reward" in line] == [e["reward"] for e in steps(run)]


def test_what_was_trained_is_written_down_token_by_token(run: Path) -> None:
    lines = [json.loads(line) for path in run.glob("rows/*/train_*.jsonl") for line in path.read_text().splitlines()]
    described = {line["rollout"]: line for line in lines if line["type"] == "rollout"}
    rows = [line for line in lines if line["type"] == "row"]
    assert {line["rollout"] for line in rows} == {name for name, line in described.items() if line["dropped"] is None}
    gaps = []
    for row in rows:
        rollout = read_session(run / row["record"])
        assert rollout.id == row["rollout"] and described[rollout.id]["task"] == rollout.task_id
        assert described[rollout.id]["reward"] == pytest.approx(rollout.reward)
        assert described[rollout.id]["advantage"] == row["advantage"]
        (trajectory,) = (t for t in build_prefix_merged(rollout).trajectories if list(t.call_indices) == row["calls"])
        trained = [place for start, end in row["trained"] for place in range(start, end)]
        assert trained == [place for place, is_trained in enumerate(trajectory.trainable) if is_trained]
        assert row["num_tokens"] == len(trajectory.token_ids) and row["num_trainable"] == len(row["logprobs"])
        gaps += [row["logprobs"][i] - trajectory.logprobs[place] for i, place in enumerate(trained)]
    by_step = {step: [row for row in rows if row["step"] == step] for step in (1, 2, 3)}
    for step, entry in enumerate(steps(run), start=1):
        assert sum(row["num_trainable"] for row in by_step[step]) == entry["polar/trained_tokens"]
    largest = max(entry["sampling/sampling_logp_difference/max"] for entry in steps(run))
    assert max(map(abs, gaps)) == pytest.approx(largest, abs=1e-5)


def test_the_settings_are_on_the_disk(run: Path) -> None:
    settings = json.loads((run / "settings.json").read_text())
    assert (settings["agent"], settings["max_steps"], settings["num_tasks"]) == ("shell", 3, 6)
    assert (Path(settings["model"]) / "config.json").exists()
    assert settings["arguments"]["num_generations"] == 4 and settings["arguments"]["adam_beta1"] == 0.9
    (start,) = settings["starts"]
    assert start["changed"]["learning_rate"] == 1e-3 and "adam_beta1" not in start["changed"]
    assert start["versions"]["trl"] == trl.__version__ and start["hardware"]["cpus"] > 0
    assert "train_worker.py" in start["command"]
    assert start["began"] <= start["ended"] and (start["first_step"], start["last_step"]) == (1, 3)


def test_a_rewritten_history_forks_and_loses_nothing(run: Path) -> None:
    kinds = {r.task_id.split("-")[1]: r for r in rollouts(run)}
    forked = kinds["fork"]
    assert forked.calls[1].parent is None
    assert forked.calls[2].parent == 1
    healthy = kinds["ok"]
    assert [call.parent for call in healthy.calls] == [None, 0, 1]


def test_token_in_token_out(run: Path) -> None:
    checked = 0
    for rollout in rollouts(run):
        for call in rollout.calls:
            if call.parent is not None:
                parent = rollout.calls[call.parent]
                sampled = parent.prompt_ids + parent.completion.token_ids
                assert call.prompt_ids[: len(sampled)] == sampled
                checked += 1
    assert checked >= 24


def test_replay_rebuilds_what_was_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert polar_trl(["replay", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sessions"] == 24
    assert report["digest_mismatches"] == 0
    assert report["trained_tokens"] == sum(entry["polar/trained_tokens"] for entry in steps(run))


def test_a_troubled_run_goes_on_and_says_what_happened(troubled_run: Path) -> None:
    assert len(steps(troubled_run)) == 3
    by_kind = {r.task_id.split("-")[1]: r for r in rollouts(troubled_run)}

    # killed in mid-session: what it sampled is graded and trained
    assert by_kind["die"].stop_reason == "agent_failed"
    assert by_kind["die"].reward == 0.0
    assert len(by_kind["die"].calls) == 1

    # out of time: the same
    assert by_kind["sleep"].stop_reason == "agent_timeout"
    assert by_kind["sleep"].reward == 0.0
    assert 6.0 <= by_kind["sleep"].seconds["agent"] < 60.0

    # no reward is not a reward of zero
    assert by_kind["grader_raises"].reward is None
    assert "broken on purpose" in by_kind["grader_raises"].error
    assert by_kind["silent"].reward is None
    assert by_kind["silent"].stop_reason == "no_calls"
    assert "exit code 3" in by_kind["silent"].error
    assert by_kind["ok"].reward is not None

    logged: dict[str, float] = {}
    for entry in steps(troubled_run):
        dropped = sum(value for key, value in entry.items() if key.startswith("polar/dropped/"))
        assert entry["polar/sampled_tokens"] == entry["polar/trained_tokens"] + dropped
        for key, value in entry.items():
            if isinstance(value, (int, float)):
                logged[key] = logged.get(key, 0) + value
    assert logged["polar/rollouts_without_reward"] == 8
    assert logged["polar/stopped/agent_timeout"] == 4
    assert logged["polar/stopped/no_calls"] == 4
    no_reward = sum(
        len(call.completion.token_ids) for r in rollouts(troubled_run) if r.reward is None for call in r.calls
    )
    untrained = logged["polar/sampled_tokens"] - logged["polar/trained_tokens"]
    assert untrained == no_reward + logged["polar/dropped/zero_variance"]
    assert no_reward == logged["polar/dropped/no_reward"] > 0 and logged["polar/dropped/zero_variance"] > 0


def test_two_processes_with_different_numbers_of_rows(tiny_model: Path, tmp_path: Path) -> None:
    # With 2 x 4 rollouts a process, rank 0 gets the forking task (two rows a rollout) and rank 1 does not.
    # A KL penalty without LoRA has a reference model of its own.
    settings = json.dumps({"gradient_accumulation_steps": 1, "max_steps": 2, "beta": 0.05})
    run_worker("train_worker.py", str(tiny_model), str(tmp_path), "fork,ok,fork,ok", settings, processes=2)
    first, second = (entry["kl"] for entry in steps(tmp_path))
    assert first == pytest.approx(0, abs=1e-9) and second > 1e-7
    assert [entry["polar/trajectories_per_rollout"] for entry in steps(tmp_path)] == [1.5, 1.5]
    ranks = {path.parts[-3].rsplit("-", 1)[1] for path in tmp_path.glob("sessions/**/*.jsonl")}
    assert ranks == {"rank0", "rank1"}
    other = json.loads((tmp_path / "rank1.json").read_text())
    assert other["weights_sum"] == pytest.approx(load(tmp_path)["weights_sum"], rel=1e-9)
    assert load(tmp_path)["greedy_gap_max"] < 1e-4


@pytest.mark.parametrize("rule", ["mask", "leave_out"])
def test_only_last_turns_of_sessions_that_were_not_cut(tiny_model: Path, tmp_path: Path, rule: str) -> None:
    settings = {"train_turns": "last", "cut_sleepers": rule, "max_steps": 1}
    run_worker("train_worker.py", str(tiny_model), str(tmp_path), "ok,sleep", json.dumps(settings))
    (entry,) = steps(tmp_path)
    rollouts = {r.id: r for r in (read_session(path) for path in tmp_path.glob("sessions/**/*.jsonl"))}
    slept = [r for r in rollouts.values() if r.stop_reason == "agent_timeout"]
    others = [r for r in rollouts.values() if r.stop_reason != "agent_timeout"]
    assert len(slept) == len(others) == 4 and all(r.reward is not None for r in rollouts.values())
    assert entry["polar/rollouts_without_reward"] == 0
    assert entry["polar/dropped/cut"] == sum(len(c.completion.token_ids) for r in slept for c in r.calls)
    counted = [r.reward or 0.0 for r in (others if rule == "leave_out" else rollouts.values())]
    assert entry["reward"] == pytest.approx(sum(counted) / len(counted), abs=1e-6)
    earlier = [c for r in others for c in r.calls[:-1]]
    assert entry["polar/dropped/not_chosen"] == sum(len(c.completion.token_ids) for c in earlier) > 0
    lines = [json.loads(line) for path in tmp_path.glob("rows/*/train_*.jsonl") for line in path.open()]
    rows = [line for line in lines if line["type"] == "row"]
    assert rows and all(line["calls"] == [len(rollouts[line["rollout"]].calls) - 1] for line in rows)
    assert Counter(line["dropped"] for line in lines if line["type"] == "rollout") == {None: 4, "cut": 4}


@pytest.mark.parametrize("processes", [1, 2])
def test_calls_have_advantages_of_their_own(tiny_model: Path, tmp_path: Path, processes: int) -> None:
    settings = {"rewards_calls": True, "turn_credit": "return_to_go", "scale_rewards": "none", "max_steps": 2}
    settings["per_device_train_batch_size"] = 4 // processes
    run_worker(
        "train_worker.py", str(tiny_model), str(tmp_path), "ok,fork,ok,ok", json.dumps(settings), processes=processes
    )
    rollouts = {r.id: r for r in (read_session(path) for path in tmp_path.glob("sessions/**/*.jsonl"))}
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts.values():
        groups[rollout.group_id].append(rollout)

    def to_go(rollout: Rollout, index: int) -> float:
        assert rollout.reward is not None and rollout.call_rewards is not None
        return rollout.reward + sum(rollout.call_rewards[call.index] for call in rollout.calls[index:])

    rows = [json.loads(line) for path in tmp_path.glob("rows/*/train_*.jsonl") for line in path.open()]
    rows = [row for row in rows if row["type"] == "row"]
    assert {row["step"] for row in rows} == {1, 2} and any(len(set(row["advantages"])) > 1 for row in rows)
    for row in rows:
        rollout = rollouts[row["rollout"]]
        others = [other for other in groups[rollout.group_id] if other is not rollout]
        for index, advantage in zip(row["calls"], row["advantages"], strict=True):
            compared = [to_go(other, index) for other in others if len(other.calls) > index]
            assert advantage == pytest.approx(to_go(rollout, index) - sum(compared) / len(compared), abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_several_agents(tiny_model: Path, tmp_path: Path, processes: int) -> None:
    """Each group is played by one of two agents, and each evaluation is of both; two ranks share a group."""
    settings = {
        "per_device_train_batch_size": 4 // processes,
        "agents": {"alpha": 1, "beta": 1},
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
    }
    arguments = (str(tiny_model), str(tmp_path), "ok,ok,fork", json.dumps(settings))
    run_worker("train_worker.py", *arguments, processes=processes)
    played: dict[str, list[str | None]] = defaultdict(list)
    for path in tmp_path.glob("sessions/**/*.jsonl"):
        rollout = read_session(path)
        played[rollout.group_id].append(rollout.agent)
    assert all(len(set(agents)) == 1 for agents in played.values())
    batches: dict[str, set[str | None]] = defaultdict(set)
    for group, agents in played.items():
        batches[group.rpartition("-")[0]].add(agents[0])
    training = [agents for batch, agents in batches.items() if batch.startswith("train")]
    assert training == [{"alpha", "beta"}] * 3  # two groups, one for each
    for entry in steps(tmp_path):
        for agent in ("alpha", "beta"):
            figures = {name: entry[f"polar/agents/{agent}/{name}"] for name in ("sessions", "reward", "forks", "gap")}
            assert figures["sessions"] == 4 and 0 <= figures["reward"] <= 1 and figures["gap"] < 1e-4
    log = load(tmp_path)["log"]
    for agent in ("alpha", "beta"):
        assert [entry["step"] for entry in log if f"eval_{agent}_reward" in entry] == [3]
    named = {agent for batch, agents in batches.items() if batch.startswith("eval") for agent in agents}
    assert named == {"alpha", "beta"}
    rows = [json.loads(line) for path in tmp_path.glob("rows/*/train_*.jsonl") for line in path.open()]
    assert {row["agent"] for row in rows if row["type"] == "row"} == {"alpha", "beta"}


def test_lora_evaluation_reward_functions_and_a_kl_penalty(tiny_model: Path, tmp_path: Path) -> None:
    settings = {
        "everything": True,
        "beta": 0.05,
        "num_iterations": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-2,
        "log_completions": True,
    }
    run_worker("train_worker.py", str(tiny_model), str(tmp_path), "ok,ok", json.dumps(settings))
    result = load(tmp_path)
    trained = steps(tmp_path)
    # four updates from two generation batches: what the second update of each sees is off-policy
    assert [entry["step"] for entry in trained] == [1, 3]
    assert all(entry["rewards/brevity/mean"] < 0 for entry in trained)
    both = trained[0]["rewards/grader/mean"] + trained[0]["rewards/brevity/mean"]
    assert trained[0]["reward"] == pytest.approx(both, abs=1e-6)
    evaluated = [entry for entry in result["log"] if "eval_reward" in entry]
    assert [entry["step"] for entry in evaluated] == [2, 4]
    assert all(entry["eval_polar/calls_per_rollout"] == 3 for entry in evaluated)
    assert any(entry.get("kl", 0) > 0 for entry in result["log"])
    # the engine has the merged adapter's weights
    assert result["moved"] > 1e-3
    assert result["greedy_gap_max"] < 1e-4
    assert list(tmp_path.glob("completions/*.parquet"))


def test_groups_of_one_reward_are_replaced(tiny_model: Path, tmp_path: Path) -> None:
    # agents that die earn 0, all of them: one of the two groups of each batch has no variance
    settings = {"max_steps": 2, "resample_zero_variance": 3}
    run_worker("train_worker.py", str(tiny_model), str(tmp_path), "die,ok,die,ok,ok,ok", json.dumps(settings))
    by_id = {rollout.id: rollout for rollout in rollouts(tmp_path)}
    trained = [json.loads(line) for line in (tmp_path / "trained.jsonl").read_text().splitlines()]
    for entry, line in zip(steps(tmp_path), trained, strict=True):
        assert entry["frac_reward_zero_std"] > 0  # of what was drawn first
        assert entry["polar/resampled_groups"] >= 1
        groups: dict[str, set[float]] = {}
        for rollout_id in line["rollouts"]:
            rollout = by_id[rollout_id]
            groups.setdefault(rollout.group_id, set()).add(rollout.reward)
        assert all(len(rewards) > 1 for rewards in groups.values())
        assert len(line["rollouts"]) == 8  # both groups have a gradient after all
        assert entry.get("polar/dropped/zero_variance", 0) == 0
