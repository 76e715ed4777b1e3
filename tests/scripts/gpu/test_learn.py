"""Test the arms of scripts/gpu/learn.py: what is compared at equal time, and rows per request in a real step."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import learn
import pytest
import yaml
from launch import find_warm_python

from polar_trl.grpo.arguments import RunParser, parse_groups
from polar_trl.run_folder import read_log
from polar_trl.tools.replay import replay

ROOT = Path(__file__).resolve().parents[3]
COUNTING = ROOT / "tests" / "grpo" / "workers" / "counting_agent.py"


def row(arm: str, step_s: float, rewards: list[float | None], **more: Any) -> dict[str, Any]:
    log = [{"polar/phase/step_s": step_s, "reward": reward} for reward in rewards]
    evaluations = [{"step": step, "eval_reward": step / 8, "eval_pass_rate": step / 16} for step in range(0, 7, 2)]
    return {"arm": arm, "seed": 1, "processes": 1, "log": log, "evaluations": evaluations, **more}


def test_runs_are_compared_at_the_end_of_the_shortest() -> None:
    fast, slow = row("fast", 0.125, [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]), row("slow", 0.3125, [0.0, 0.4, 1.0, 1.0])
    broken, other = row("broken", 0.01, [1.0], error="x"), row("other", 1.0, [0.5, None], seed=2)
    learn.compare_at_equal_time([fast, slow, broken, other])
    assert (fast["equal_s"], fast["equal_updates"], fast["equal_reward"]) == (0.75, 6, 1.0)
    assert (slow["equal_s"], slow["equal_updates"], slow["equal_reward"]) == (0.75, 2, 0.4)
    assert (fast["equal_held_out"], slow["equal_held_out"]) == (0.5, 0.25)  # the slow one had evaluated after two
    assert (fast["held_out"], slow["solved"]) == (0.75, 37.5)
    assert "equal_s" not in broken and (other["equal_updates"], other["equal_reward"]) == (2, "no step ended")


def test_the_documented_commands(tmp_path: Path) -> None:
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("paper", "rewards"))
    found = re.findall(r"^bash scripts/gpu/run\.sh learn (.*)$", pages.replace("\\\n", " "), re.MULTILINE)
    assert len(found) == 4
    for line in found:
        args = learn.build_parser().parse_args(["--out", str(tmp_path), *shlex.split(line)])
        runs = learn.build_runs(args, [])
        assert [run.arm for run in runs] == args.arms * len(args.seeds)
        for run in runs:
            command = run.build_command(args)
            assert (learn.WRAPPERS.get(run.arm) in command) == (run.arm == "per_request")
            _, config, *_ = parse_groups(RunParser(), command[command.index("--config") :])
            assert config.max_policy_lag == (run.arm == "carry_over")
            assert config.turn_credit == learn.ARMS[run.arm].get("turn_credit", "none")
            assert config.weight_rounding == ("nearest" if run.arm.endswith("nearest") else "dithered")


@pytest.mark.parametrize(("arm", "rows"), [("merged", 1), ("per_request", 3)])
def test_rows_per_request_train_the_same_tokens_in_more_rows(
    tiny_model: Path, tmp_path: Path, arm: str, rows: int
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(COUNTING.read_text())
    tasks = "".join(f'{{"id": "t{i}", "instruction": "task {i}: ok"}}\n' for i in range(2))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    (tmp_path / "grader.py").write_text("def grade(task, sandbox):\n    return 1.0\n")
    keys: dict[str, Any] = {
        "agent_command": "python3 -I -S ~/agent.py {instruction}", "agent_files": ["agent.py"], "sandbox": "local",
        "tasks": "tasks.jsonl", "grader": "grader:grade", "output_dir": "run", "model_name_or_path": str(tiny_model),
        "max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2,
        "max_completion_length": 8, "vllm_max_model_length": 512, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "drop_zero_variance": False,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys | learn.ARMS[arm]))
    script = [str(ROOT / name) for name in (learn.WRAPPERS.get(arm), "scripts/train.py") if name]
    command = [find_warm_python(), *script, "--config", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in read_log(tmp_path / "run") if "reward" in line]
    assert line["polar/calls_per_rollout"] == 3 and line["polar/trajectories_per_rollout"] == rows
    assert line["polar/trained_tokens"] == line["polar/sampled_tokens"] > 0
    report = replay(tmp_path / "run", "prefix_merging", print)
    assert (report.digests_compared, report.digest_mismatches) == (4, 0)
