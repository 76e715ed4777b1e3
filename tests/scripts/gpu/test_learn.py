"""scripts/gpu/learn.py: arms are settings of a run, and a command that goes on does what is missing."""

import argparse
from pathlib import Path

import pytest

from polar_trl.grpo.arguments import RunParser, parse_run

ROOT = Path(__file__).resolve().parents[3]

import learn  # noqa: E402

ARGS = argparse.Namespace(
    config=str(ROOT / "configs" / "quickstart.yaml"),
    model="MODEL",
    arms=list(learn.ARMS),
    seeds=[1, 2],
    processes=[1],
    steps=30,
    per_gpu=1,
    out=Path("runs"),
    name="learn",
    rest=["--temperature", "0.8"],
)


@pytest.mark.parametrize("arm", learn.ARMS)
def test_an_arm_is_settings_of_a_run(arm: str) -> None:
    run = learn.Run(arm, 7, 1, Path("runs/x"), gpus=[0])
    command = run.build_command(ARGS)
    _, args, model = parse_run(RunParser(), command[command.index("scripts/train.py") + 1 :])
    assert (args.bf16, args.fp16) == {"float32": (False, False), "float16": (False, True)}.get(arm, (True, False))
    assert (args.seed, args.max_steps, args.temperature) == (7, 30, 0.8)
    assert model.use_peft == (arm == "lora")
    assert args.weight_rounding == ("nearest" if arm == "bfloat16_nearest" else "dithered")


def test_what_has_a_row_is_not_run_again() -> None:
    done = [{"arm": "lora", "seed": seed, "processes": 1, "reward": 0.5} for seed in (1, 3)]
    left = [(run.arm, run.seed) for run in learn.build_runs(ARGS, done)]
    assert left == [(arm, seed) for seed in (1, 2) for arm in learn.ARMS if (arm, seed) != ("lora", 1)]
