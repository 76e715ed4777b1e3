"""Generate small shell tasks with exact answers, for models that can barely use a shell, and grade them.

    python -m polar_trl.tasks.shell_ladder --kinds copy_command,copy_file --num 96 --seed 0 --output tasks.jsonl

The grader reads files and runs nothing. Anything but the exact result earns at most 0.4.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, FileTooLargeError
from polar_trl.sandbox.base import Sandbox
from polar_trl.tasks.jsonl import load_tasks, save_tasks
from polar_trl.types import Task

WORDS = (
    *("red", "blue", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "lake", "road", "hill", "snow", "rain"),
    *("gold", "iron", "salt", "bread", "milk", "stone", "river", "cloud", "apple", "lemon", "horse", "tiger"),
    *("north", "south", "piano", "cello"),
)


MAX_DRAWS = 1000
"""Of a task, until one is found that is not used already."""
TOO_LONG = "\ufffd"
"""Stands for a file longer than any answer. Not "", which is what an empty file should hold."""


def _copy_command(rng: random.Random) -> dict[str, Any]:
    word, name = rng.sample(WORDS, 2)
    command = f"echo {word} > {name}.txt"
    return {"instruction": f"Run this shell command: {command}", "gold": command, "expected": {f"{name}.txt": word}}


def _touch(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(WORDS)
    return {
        "instruction": f"Create an empty file named {name}.txt",
        "gold": f"touch {name}.txt",
        "expected": {f"{name}.txt": ""},
    }


def _write_word(rng: random.Random) -> dict[str, Any]:
    word, name = rng.sample(WORDS, 2)
    return {
        "instruction": f"Write the word {word} into the file {name}.txt",
        "gold": f"echo {word} > {name}.txt",
        "expected": {f"{name}.txt": word},
    }


def _copy_file(rng: random.Random) -> dict[str, Any]:
    source, target = rng.sample(WORDS, 2)
    text = " ".join(rng.sample(WORDS, 3))
    return {
        "instruction": f"Copy the file {source}.txt to {target}.txt",
        "gold": f"cp {source}.txt {target}.txt",
        "files": {f"{source}.txt": text + "\n"},
        "expected": {f"{target}.txt": text},
    }


def _count_lines(rng: random.Random) -> dict[str, Any]:
    name, num_lines = rng.choice(WORDS), rng.randint(3, 30)
    return {
        "instruction": f"Count the lines of {name}.txt and write only the number into the file answer.txt",
        "gold": f"wc -l < {name}.txt > answer.txt",
        "files": {f"{name}.txt": "".join(rng.choice(WORDS) + "\n" for _ in range(num_lines))},
        "expected": {"answer.txt": str(num_lines)},
    }


KINDS: Mapping[str, tuple[int, Callable[[random.Random], dict[str, Any]]]] = {
    "copy_command": (0, _copy_command),
    "touch": (0, _touch),
    "write_word": (1, _write_word),
    "copy_file": (1, _copy_file),
    "count_lines": (2, _count_lines),
}
"""Kinds with their levels, easiest first, and their generators."""


def build_tasks(kinds: Sequence[str], num_tasks: int, seed: int, without: Sequence[Task] = ()) -> list[Task]:
    """Generate tasks, the kinds in turn. `metadata` holds kind, level, the expected files and a solving command.

    Args:
        without: Tasks whose instructions are not used again, such as those that a model is trained on.
    """
    if not kinds:
        raise ConfigError(f"no task kinds given; there are {', '.join(KINDS)}")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"no task kind {kind!r}; there are {', '.join(KINDS)}")
    rng, used = random.Random(seed), {task.instruction for task in without}
    tasks = []
    for index in range(num_tasks):
        kind = kinds[index % len(kinds)]
        level, make = KINDS[kind]
        made = next((made for made in (make(rng) for _ in range(MAX_DRAWS)) if made["instruction"] not in used), None)
        if made is None:
            raise ConfigError(f"nearly every task of kind {kind!r} is used already; ask for another kind")
        tasks.append(
            Task(
                id=f"{kind}-{seed}-{index:04d}",
                instruction=made["instruction"],
                files=made.get("files", {}),
                agent_timeout_s=120.0,
                metadata={"kind": kind, "level": level, "expected": made["expected"], "gold": made["gold"]},
            )
        )
    return tasks


def grade(task: Task, sandbox: Sandbox) -> float:
    """Return 1.0 where every expected file is exact and the inputs are as they were; at most 0.4 otherwise.

    The reward is shaped, so that a group of failures can still differ: 0.1 for each expected file that is there, and
    up to 0.3 for the similarity of its text to the expected one, averaged over files.
    """
    expected: Mapping[str, str] = task.metadata["expected"]
    texts = {path: _read(sandbox, path) for path in expected}
    if all(text is not None and text.strip() == expected[path].strip() for path, text in texts.items()):
        return 1.0 if all(_read(sandbox, path) == text for path, text in task.files.items()) else 0.2
    credits = [
        0.1 + 0.3 * SequenceMatcher(None, text.strip(), expected[path].strip()).ratio() if text is not None else 0.0
        for path, text in texts.items()
    ]
    return sum(credits) / len(credits)


def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        content = sandbox.get(path, max_bytes=4096)
    except FileTooLargeError:
        # there and wrong, since no answer is that long: the agent's failure, not the grader's
        return TOO_LONG
    return None if content is None else content.decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="copy_command,copy_file", help="of " + ", ".join(KINDS))
    parser.add_argument("--num", type=int, default=96, help="how many tasks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=Path, metavar="FILE", help="JSONL file of tasks that are not to come again")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    try:
        without = [] if args.without is None else load_tasks(args.without)
        tasks = build_tasks(args.kinds.split(","), args.num, args.seed, without)
    except ConfigError as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    save_tasks(args.output, tasks)


if __name__ == "__main__":
    main()
