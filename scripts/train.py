#!/usr/bin/env python3
"""Train a model inside an agent: one YAML file is a whole run, and every key of it can be given as a flag.

  accelerate launch scripts/train.py --config configs/quickstart.yaml
  accelerate launch scripts/train.py --config configs/quickstart.yaml --max_steps 3 --seed 7
  accelerate launch --multi_gpu --num_processes 2 scripts/train.py --config configs/quickstart.yaml

The last form is for two CPU processes too: without --multi_gpu, accelerate starts one process on a CPU.

The keys are those of `RunArguments` (polar_trl/setup/run_setup.py), of `PolarGRPOConfig` (which holds all of TRL's
`GRPOConfig`) and of TRL's `ModelConfig` (model_name_or_path, use_peft, lora_r, ...). Unknown keys are refused.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar_trl.cli.process import sigterm_interrupts
from polar_trl.errors import DiskError, PolarError
from polar_trl.run_folder import disk_errors

if TYPE_CHECKING:
    from trl import ModelConfig

    from polar_trl.grpo.config import PolarGRPOConfig
    from polar_trl.setup.run_setup import RunArguments


def main() -> None:
    # before the imports that take long: a launcher that ends meanwhile is noticed
    with sigterm_interrupts(with_launcher=True):
        try:
            run()
        except PolarError as error:
            sys.exit(f"train: {error}")
        except KeyboardInterrupt:
            sys.exit("train: stopped before the first step")
        except OSError as error:
            if error.filename is None:  # not a file's
                raise
            sys.exit(f"train: {error.filename}: {error.strerror}")


def run() -> None:
    """Train by the settings of the command line."""
    from polar_trl.grpo.arguments import RunParser, parse_run
    from polar_trl.grpo.logs.summary import build_summary, print_summary, write_summary
    from polar_trl.grpo.preflight import own_output_dir
    from polar_trl.grpo.resume.checkpoint import choose_start

    parser = RunParser(description=__doc__)
    settings, args, model_config = parse_run(parser)
    started, folder = time.monotonic(), Path(args.output_dir)
    own_output_dir(args)
    checkpoint = choose_start(folder, args.resume_from_checkpoint)
    if checkpoint is not None and is_over(args, checkpoint):
        print(f"the run in {folder} made all of its {args.max_steps} steps; set max_steps higher to go on")
        return
    with disk_errors(folder):
        trainer = build_trainer(settings, args, model_config)
    trainer.settings_log.add(settings, model_config, run_file=parser.run_file)
    try:
        with disk_errors(folder):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            if args.save_strategy != "no":
                trainer.save_model()
    except DiskError as error:
        sys.exit(f"train: {error}; make room, and {explain_resume(folder)}")
    except KeyboardInterrupt:
        sys.exit(f"train: stopped at step {trainer.state.global_step}; {explain_resume(folder)}")
    finally:
        trainer.close()
    if trainer.accelerator.is_main_process:
        seconds = trainer.resume.seconds_before + time.monotonic() - started
        summary = build_summary(trainer.state.log_history, seconds=seconds)
        with disk_errors(folder):
            write_summary(folder, summary)
        print_summary(summary)
        print(f"run folder: {folder}\npicture:    {folder / 'rewards.png'}")
        print(f"look at it: polar-trl inspect {folder}\ncheck it:   polar-trl replay {folder}")


def is_over(args: "PolarGRPOConfig", checkpoint: Path) -> bool:
    """Tell whether nothing is left to do after a checkpoint."""
    from polar_trl.grpo.resume.checkpoint import read_step

    return 0 < args.max_steps <= read_step(checkpoint) and (Path(args.output_dir) / "summary.json").exists()


def explain_resume(folder: Path) -> str:
    """Say how to go on with a run that was stopped."""
    from polar_trl.grpo.resume.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return f"no checkpoint was written yet (save_strategy, save_steps); sessions are recorded in {folder}"
    return f"--resume_from_checkpoint auto goes on from {checkpoint}"


def build_trainer(settings: "RunArguments", args: "PolarGRPOConfig", model_config: "ModelConfig") -> Any:
    """Everything that a run needs, from its settings."""
    from trl import get_peft_config  # before polar_trl it would let bitsandbytes print

    from polar_trl.grpo.arguments import refuse_unread
    from polar_trl.grpo.resume.model_folder import require_name
    from polar_trl.grpo.trainer import PolarGRPOTrainer
    from polar_trl.setup.run_setup import build_parts, load_run_tasks

    refuse_unread(model_config)
    require_name(model_config.model_name_or_path)
    train, evals = load_run_tasks(settings)
    parts = build_parts(
        settings,
        [*train, *evals],
        run_id=Path(args.output_dir).name,
        check_jobs=args.max_grading,
        is_first=args.local_process_index == 0,
        limits=args.endpoint_limits,
    )
    try:
        return PolarGRPOTrainer(
            model=model_config.model_name_or_path,
            args=args,
            train_dataset=train,
            eval_dataset=evals or None,
            harness=parts.harness,
            sandbox=parts.backend,
            grader=parts.grader,
            peft_config=get_peft_config(model_config),
        )
    except BaseException:
        parts.backend.close()
        raise


if __name__ == "__main__":
    main()
