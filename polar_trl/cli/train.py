"""Train a model inside an agent: one YAML file is a whole run, and every key of it can be given as a flag.

  polar-trl train quickstart
  polar-trl train quickstart --max_steps 3 --seed 7
  polar-trl train my_run.yaml --accelerate fsdp2
  accelerate launch --multi_gpu --num_processes 2 -m polar_trl.cli.train --config quickstart

The run file is a path, or the name of one that `polar-trl configs` lists; so is the accelerate file. The last form is
for two CPU processes too: without --multi_gpu, accelerate starts one process on a CPU.

The keys are those of `RunArguments` (polar_trl/setup/run_setup.py), of `PolarGRPOConfig` (which holds all of TRL's
`GRPOConfig`), of TRL's `ModelConfig` (model_name_or_path, use_peft, lora_r, ...) and those of `trl grpo`
(dataset_name, reward_funcs, ...). Unknown keys are refused.
"""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from polar_trl.cli.process import sigterm_interrupts
from polar_trl.configs import find_config
from polar_trl.errors import DiskError, PolarError
from polar_trl.run_folder import SUMMARY_FILE, disk_errors

if TYPE_CHECKING:
    from trl import ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    from polar_trl.grpo.config import PolarGRPOConfig
    from polar_trl.setup.run_setup import RunArguments


_NOT_OF_AN_EVALUATION = (
    *("--output_dir", "--model_name_or_path", "--resume_from_checkpoint"),
    *("--push_to_hub", "--hub_model_id", "--hub_token"),
)


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
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config_file)]
    settings = config_file.read_text(encoding="utf-8")
    if "main_process_port" not in settings and "main_process_ip" not in settings:
        # accelerate's own default is one port for all runs of a machine
        with socket.create_server(("127.0.0.1", 0)) as free:
            launcher += ["--main_process_port", str(free.getsockname()[1])]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "polar_trl.cli.train", *flags])


def train(words: Sequence[str]) -> None:
    """Train by the settings of these flags."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not any(word.startswith("--help") for word in words):
        print("loading torch, TRL and vLLM ...", file=sys.stderr, flush=True)
    from polar_trl.grpo.arguments import RunParser, parse_groups
    from polar_trl.grpo.logs.terminal import say
    from polar_trl.grpo.resume.checkpoint import choose_start, explain_dead_end, wants_newest
    from polar_trl.grpo.run.finish import explain_resume
    from polar_trl.grpo.run.machines import own_output_dir, require_same_run
    from polar_trl.harness.mixed import list_mixed
    from polar_trl.setup.run_setup import list_eval_sources

    parser = RunParser(prog="polar-trl train", description=__doc__)
    settings, args, model_config, script = parse_groups(parser, words)
    folder = Path(args.output_dir)
    own_output_dir(args)
    require_same_run(settings, args, model_config, script)
    is_made = is_over(args)
    if not (is_made and wants_newest(args.resume_from_checkpoint)):
        choose_start(folder, args.resume_from_checkpoint)  # raises where a run would begin in the folder of another
    if is_made:
        advice = "" if explain_dead_end(folder) else "; set max_steps higher to go on"
        print(f"the run in {folder} made all of its {args.max_steps} steps{advice}")
        return
    with disk_errors(folder), build_trainer(settings, args, model_config, script) as trainer:
        trainer.settings_log.add(settings, model_config, script, run_file=parser.run_file)
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except DiskError as error:
            sys.exit(f"train: {error}; make room, and {explain_resume(folder)}")
        except KeyboardInterrupt:
            sys.exit(f"train: stopped at step {trainer.state.global_step}; {explain_resume(folder)}")
        # a data set of rows (dataset_name) is none that an evaluation reads
        has_tasks = bool(settings.eval_tasks or settings.tasks)
        if has_tasks and args.save_strategy != "no" and trainer.accelerator.is_main_process:
            agents = list_mixed(trainer.rollouts.runner.harness)
            say(f"evaluate:   {format_eval(words, folder, list_eval_sources(settings), agents)}")


def format_eval(words: Sequence[str], folder: Path, sources: Mapping[str, str], agents: Sequence[str] = ()) -> str:
    """Format the command that evaluates a run's model, in the folder where the run was started.

    Args:
        words: The run's flags. Paths in them and in the run file are relative to the current folder.
        folder: The run's.
        sources: Of its evaluation sets, by name; of several the first is taken.
        agents: Of a run that has several; the first is taken.
    """
    kept: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not kept:
            kept.append([])
        kept[-1].append(word)
    kept = [flag for flag in kept if flag[0].partition("=")[0] not in _NOT_OF_AN_EVALUATION]
    if sources and "" not in sources:
        kept = [flag for flag in kept if flag[0].partition("=")[0] not in ("--tasks", "--eval_tasks")]
        kept.append(["--tasks", next(iter(sources.values()))])
    kept += [["--agent", agent] for agent in agents[:1]]
    kept += [["--model_name_or_path", str(folder)], ["--output_dir", f"{folder}-eval"]]
    return shlex.join(["polar-trl", "eval", *(word for flag in kept for word in flag)])


def is_over(args: "PolarGRPOConfig") -> bool:
    """Tell whether the run in `output_dir` ended and has no step left to make."""
    from polar_trl.grpo.logs.trained_log import read_last_step
    from polar_trl.grpo.resume.checkpoint import find_problem, list_checkpoints

    folder = Path(args.output_dir)
    if args.max_steps <= 0 or not (folder / SUMMARY_FILE).exists():
        return False
    whole = [step for step, path in list_checkpoints(folder) if find_problem(path) is None]
    # without a checkpoint to go on from, nothing but the record of its steps says how far it came
    return args.max_steps <= (whole[-1] if whole else read_last_step(folder))


def build_trainer(
    settings: "RunArguments", args: "PolarGRPOConfig", model_config: "ModelConfig", script: "GRPOScriptArguments"
) -> Any:
    """Everything that a run needs, from its settings."""
    from trl import get_peft_config  # before polar_trl it would let bitsandbytes print

    from polar_trl.grpo.resume.model_folder import require_name
    from polar_trl.grpo.resume.resume import require_same_order
    from polar_trl.grpo.run.machines import failing_together
    from polar_trl.grpo.trainer import PolarGRPOTrainer
    from polar_trl.grpo.trl_arguments.script import list_script_rewards, load_script_sets
    from polar_trl.setup.agents import build_harness
    from polar_trl.setup.run_setup import build_parts, load_run_tasks

    model = require_name(model_config.model_name_or_path)
    with failing_together():  # an agent, a package or a container engine may be missing on one machine alone
        train, evals = load_run_tasks(settings, *load_script_sets(script, settings, args))
        require_same_order(Path(args.output_dir), args, [task.id for task in train], build_harness(settings))
        parts = build_parts(
            settings,
            [*train, *chain.from_iterable(evals.values())],
            run_id=Path(args.output_dir).name,
            check_jobs=args.max_grading,
            is_first=args.local_process_index == 0,
            limits=args.endpoint_limits,
        )
    try:
        return PolarGRPOTrainer(
            model=model,
            args=args,
            reward_funcs=list_script_rewards(script),
            train_dataset=train,
            eval_dataset=evals.get("", evals) or None,
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
