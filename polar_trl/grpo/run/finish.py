"""Finish a run: its summary and picture in its folder, and what it came to on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.evaluations import compare_evaluations, format_solved
from polar_trl.grpo.logs.summary import build_summary, write_summary
from polar_trl.grpo.logs.terminal import format_duration, say
from polar_trl.grpo.resume.checkpoint import GO_ON, explain_dead_end, find_checkpoint
from polar_trl.grpo.run.best import write_best


def finish_run(
    folder: Path,
    log_history: Sequence[Mapping[str, Any]],
    args: GRPOConfig,
    *,
    seconds: float,
    is_saved: bool,
    is_held_out: bool,
) -> None:
    """Write `summary.json`, `best.json` and `rewards.png`, and say what the run came to. One rank calls it.

    Args:
        log_history: `trainer.state.log_history`.
        args: The run's, by which the best checkpoint is chosen.
        seconds: Wall time of the run (s).
        is_saved: Whether the model is in the folder.
        is_held_out: Whether no task of an evaluation was trained.
    """
    best = write_best(log_history, folder, args)
    try:
        summary = build_summary(log_history, seconds=seconds) | {"best": best}
    except ConfigError as error:  # nothing was logged, and the model is trained all the same
        say(f"no summary: {error}")
    else:
        write_summary(folder, summary)
        first, last = summary["reward_first_quarter"], summary["reward_last_quarter"]
        say(
            f"{summary['steps']} steps in {format_duration(seconds)}: mean reward {first:.3f} in the first quarter, "
            f"{last:.3f} in the last"
        )
    for sentence in compare_evaluations(log_history, kind="held-out" if is_held_out else "evaluation"):
        say(sentence)
    if best is not None:
        say(f"best:       {best['checkpoint'] or 'not saved'}, step {best['step']}: {describe_best(best)}")
    say(f"model:      {folder if is_saved else 'not saved (save_strategy is no)'}")
    if (picture := folder / "rewards.png").exists():  # nothing was logged otherwise
        say(f"picture:    {picture}")
    say(f"look at it: polar-trl inspect {folder}")
    say(f"check it:   polar-trl replay {folder}")


def describe_best(best: Mapping[str, Any]) -> str:
    """Describe the evaluation of the best checkpoint."""
    solved = f", solved {format_solved(best, '')}" if "graded" in best else ""
    return f"{best['metric']} {best['value']:.3f}{solved}"


def explain_resume(folder: Path) -> str:
    """Say how to go on with a run that was stopped."""
    if problem := explain_dead_end(folder):
        return f"{folder} {problem}"
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return f"no checkpoint was written yet (save_strategy, save_steps); sessions are recorded in {folder}"
    return f"{GO_ON} goes on from {checkpoint}"
