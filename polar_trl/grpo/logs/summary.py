"""Summarize a finished run: summary.json, and a plot of the reward per step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.evaluations import list_evaluations
from polar_trl.grpo.logs.reasons_file import summarize_reasons
from polar_trl.run_folder import SUMMARY_FILE, write_whole


def build_summary(log_history: Sequence[Mapping[str, Any]], *, seconds: float) -> dict[str, Any]:
    """Compute a run's figures from TRL's log history (`trainer.state.log_history`, one entry per logged step).

    `reward_first_quarter` and `reward_last_quarter` are means over the first and last quarter of the steps that
    have a reward (at least one each); token counts are sums, `logprob_gap_max` is the largest of all steps, the other
    figures means over all logged steps.
    """
    steps = [entry for entry in log_history if "polar/sampled_tokens" in entry]
    rewards = [entry["reward"] for entry in steps if entry.get("reward") is not None]
    if not rewards:
        raise ConfigError("the run logged no reward: no step was made, or logging_steps is larger than the run")
    first, last = average_quarters(rewards)

    def mean(key: str) -> float | None:
        values = [entry[key] for entry in steps if entry.get(key) is not None]
        return sum(values) / len(values) if values else None

    def largest(key: str) -> float | None:
        return max((entry[key] for entry in steps if entry.get(key) is not None), default=None)

    def total(key: str) -> int:
        return int(sum(entry.get(key) or 0 for entry in steps))

    return {
        "steps": len(steps),
        "seconds": round(seconds, 1),
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "rewards": rewards,
        "sampled_tokens": total("polar/sampled_tokens"),
        "trained_tokens": total("polar/trained_tokens"),
        "trajectories_per_rollout": mean("polar/trajectories_per_rollout"),
        "calls_per_rollout": mean("polar/calls_per_rollout"),
        "rollouts_without_reward": total("polar/rollouts_without_reward"),
        "logprob_gap_mean": mean("sampling/sampling_logp_difference/mean"),
        "logprob_gap_p99": mean("sampling/sampling_logp_difference/p99"),
        "logprob_gap_max": largest("sampling/sampling_logp_difference/max"),
        **{
            f"seconds_{name}": sum(entry.get(f"polar/phase/{name}_s") or 0 for entry in steps)
            for name in ("rollouts", "training", "optimizer", "weight_sync", "wake", "sleep", "planning")
        },
        "overhead_share": mean("polar/phase/overhead_share"),
        "evaluations": list_evaluations(log_history),
    }


def average_quarters(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last quarter of the steps, of one step at least."""
    quarter = max(1, len(rewards) // 4)
    return sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter


def plot_rewards(curves: Mapping[str, Sequence[float]], path: Path, *, title: str) -> None:
    """Draw curves of rewards, one value per step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, "o-", markersize=3, label=label)
    everything = [value for values in curves.values() for value in values]
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=(min(0.0, *everything), max(1.05, *everything)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`, with the reasons of the run's sessions, and `rewards.png` into the run's folder."""
    summary = {**summary, **summarize_reasons(folder)}
    write_whole(folder / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())
    rewards = summary["rewards"]
    last_five = [rewards[max(0, end - 5) : end] for end in range(1, len(rewards) + 1)]
    curves = {"of the step": rewards, "of the last five steps": [sum(w) / len(w) for w in last_five]}
    plot_rewards(curves, folder / "rewards.png", title=folder.name)
