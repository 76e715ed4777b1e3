#!/usr/bin/env python3
"""Tasks of several lines, each a small request of its own, and a grader that rewards the call which answers a line.

    python examples/call_rewards/lines.py --num 24 --split train --output examples/call_rewards/tasks.jsonl

The agent (shell_agent.py --each-line) makes one model call for each line, in one conversation.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from polar_trl import Grade, Task
from polar_trl.tasks.jsonl import save_tasks
from polar_trl.tasks.shell_ladder import build_tasks, grade

KINDS = ("copy_command", "touch", "write_word")
NUM_LINES = 4


def join(tasks):
    """Join tasks into tasks of `NUM_LINES` lines that write different files; what makes no whole task is left out."""
    parts = []
    for task in tasks:
        (name,) = task.metadata["expected"]
        part = next((part for part in parts if len(part) < NUM_LINES and name not in part), None)
        if part is None:
            parts.append(part := {})
        part[name] = task
    return [
        Task(
            id=f"lines-{number:02d}",
            instruction="\n".join(task.instruction for task in part.values()),
            metadata={"lines": [task.metadata for task in part.values()]},
        )
        for number, part in enumerate(part for part in parts if len(part) == NUM_LINES)
    ]


def grade_lines(task, sandbox, calls):
    """Grade each line by itself: the call that answers it is rewarded with that, the session with their mean."""
    rewards = [grade(replace(task, metadata=line), sandbox) for line in task.metadata["lines"]]
    return Grade(
        reward=fmean(rewards),
        call_rewards={call.index: reward for call, reward in zip(calls, rewards, strict=False)},
    )


def main():
    """Write the tasks of a split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=24, help="tasks at most (default: %(default)s)")
    parser.add_argument("--split", choices=("train", "test"), required=True, help="which share no answer")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    save_tasks(args.output, join(build_tasks(KINDS, args.num * NUM_LINES, 0, split=args.split)))


if __name__ == "__main__":
    main()
