"""Train a model inside an agent: one YAML file is a whole run, and every key of it can be given as a flag.

  polar-trl train quickstart
  polar-trl train quickstart --max_steps 3 --seed 7
  polar-trl train my_run.yaml --accelerate fsdp2
  accelerate launch --multi_gpu --num_processes 2 -m polar_trl.cli.train --config quickstart

The run file is a path, or the name of one that `polar-trl configs` lists; so is the accelerate file. The last form is
for two CPU processes too: without --multi_gpu, accelerate starts one process on a CPU.

The keys are those of `RunArguments` (polar_trl/setup/run_setup.py), of `PolarGRPOConfig` (which holds all of TRL's
`GRPOConfig`) and of TRL's `ModelConfig` (model_name_or_path, use_peft, lora_r, ...). Unknown keys are refused.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from polar_trl.cli.process import sigterm_interrupts
from polar_trl.configs import find_config
from polar_trl.errors import DiskError, PolarError
from polar_trl.run_folder import disk_errors

if TYPE_CHECKING:
    from trl import ModelConfig

    from polar_trl.grpo.config import PolarGRPOConfig
    from polar_trl.setup.run_setup import RunArguments


def add_parser(subparsers: Any) -> None:
    """Add the subcommand. Its words, --help among them, are read by `main`."""
    parser = subparsers.add_parser(
        "train", help="train a model inside an agent", add_help=False, allow_abbrev=False, prefix_chars="\0"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl train`."""
    main(args.words)
    return 0


def main(words: Sequence[str] | None = None) -> None:
    """Train by the words of a command line; None: those of this process. What is wrong ends it with one sentence."""
    # before the imports that take long: a launcher that ends meanwhile is noticed
    with sigterm_interrupts(with_launcher=True):
        try:
            accelerate, flags = split_words(sys.argv[1:] if words is None else words)
            if accelerate is not None:
                launch(find_config(accelerate, "accelerate"), flags)
            train(flags)
        except PolarError as error:
            sys.exit(f"train: {error}")
        except KeyboardInterrupt:
            sys.exit("train: stopped before the first step")
        except OSError as error:
            if error.filename is None:  # not a file's
                raise
            sys.exit(f"train: {error.filename}: {error.strerror}")


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the accelerate file from the flags of the run, of which a leading NAME becomes --config."""
    parser = argparse.ArgumentParser(prog="polar-trl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate", metavar="FILE")
    found, flags = parser.parse_known_args(words)
    if flags and not flags[0].startswith("-"):
        flags.insert(0, "--config")
    return found.accelerate, flags


def launch(config_file: Path, flags: Sequence[str]) -> NoReturn:
    """Become `accelerate launch`, which starts the run's processes."""
    launcher = ("-m", "accelerate.commands.launch", "--config_file", str(config_file), "-m", "polar_trl.cli.train")
    os.execv(sys.executable, [sys.executable, *launcher, *flags])


def train(words: Sequence[str]) -> None:
    """Train by the settings of these flags."""
    from polar_trl.grpo.arguments import RunParser, parse_run
    from polar_trl.grpo.logs.summary import build_summary, print_summary, write_summary
    from polar_trl.grpo.preflight import own_output_dir
    from polar_trl.grpo.resume.checkpoint import choose_start

    parser = RunParser(prog="polar-trl train", description=__doc__)
    settings, args, model_config = parse_run(parser, words)
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
    model = require_name(model_config.model_name_or_path)
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
            model=model,
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
