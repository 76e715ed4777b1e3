"""Generate small shell tasks with exact answers, for models that can barely use a shell, and grade them.

    python -m polar_trl.tasks.shell_ladder --kinds copy_command,copy_file --num 96 --seed 0 --output tasks.jsonl
    python -m polar_trl.tasks.shell_ladder --kinds files,search,edit,fix --split train --output train.jsonl

The grader reads files and runs nothing. Anything but the exact result earns at most 0.4.
"""

import argparse
import hashlib
import random
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, get_args

from polar_trl.errors import ConfigError, FileTooLargeError
from polar_trl.sandbox.base import Sandbox
from polar_trl.tasks.jsonl import load_tasks, save_tasks
from polar_trl.tasks.shell_kinds import KINDS
from polar_trl.types import Task

MAX_DRAWS = 1000
"""Of a task, until one is found that is not used already."""
TOO_LONG = "\ufffd"
"""Stands for a file longer than any answer. Not "", which is what an empty file should hold."""
Split = Literal["train", "test"]
FAMILIES: Mapping[str, Sequence[str]] = {
    family: [name for name, kind in KINDS.items() if kind.family == family]
    for family in dict.fromkeys(kind.family for kind in KINDS.values())
    if family is not None
}
"""The kinds of each family, easiest first."""


def build_tasks(
    kinds: Sequence[str], num_tasks: int, seed: int, without: Sequence[Task] = (), split: Split | None = None
) -> list[Task]:
    """Generate tasks, the kinds in turn. `metadata` holds kind, level, the expected files and a solving command.

    Args:
        kinds: Names of kinds, and of families for all of theirs.
        without: Tasks whose instructions are not used again, such as those that a model is trained on.
        split: Only tasks whose instruction and whose every answer fall on this side of a hash, so that tasks of the
            two splits share neither, whatever their seeds.
    """
    names = ", ".join([*FAMILIES, *KINDS])
    kinds = [name for kind in kinds for name in FAMILIES.get(kind, [kind])]
    if not kinds:
        raise ConfigError(f"no task kinds given; there are {names}")
    for name in kinds:
        if name not in KINDS:
            raise ConfigError(f"no task kind {name!r}; there are {names}")
    rng, used = random.Random(seed), {task.instruction for task in without}
    tasks = []
    for index in range(num_tasks):
        name = kinds[index % len(kinds)]
        kind = KINDS[name]
        draws = (kind.make(rng) for _ in range(MAX_DRAWS))
        made = next((made for made in draws if made["instruction"] not in used and _is_of(split, made)), None)
        if made is None:
            raise ConfigError(f"nearly every task of kind {name!r} is used already; ask for another kind")
        metadata = {"kind": name, "level": kind.level, "expected": made["expected"], "gold": made["gold"]}
        if kind.family is not None:
            metadata |= {"family": kind.family, "gone": made.get("gone", [])}
        tasks.append(
            Task(
                id=f"{name}-{split}-{seed}-{index:04d}" if split else f"{name}-{seed}-{index:04d}",
                instruction=made["instruction"],
                files=made.get("files", {}),
                agent_timeout_s=120.0,
                metadata=metadata,
            )
        )
    return tasks


def _is_of(split: Split | None, made: Mapping[str, Any]) -> bool:
    """Return whether all that identifies a task hashes to the split: an even first byte of SHA-256 is for training.

    An answer is a file's text, or the name of a file that should be empty.
    """
    texts = [made["instruction"], *(text.strip() or path for path, text in made["expected"].items())]
    return split is None or all(hashlib.sha256(text.encode()).digest()[0] % 2 == (split == "test") for text in texts)


def grade(task: Task, sandbox: Sandbox) -> float:
    """Return 1.0 where every expected file is exact and the other inputs are as they should be; at most 0.4 otherwise.

    The reward is shaped, so that a group of failures can still differ: 0.1 for each expected file that is there, and
    up to 0.3 for the similarity of its text to the expected one, averaged over files. Of a file that was an input,
    both count from its first text on, which earns nothing.
    """
    expected: Mapping[str, str] = task.metadata["expected"]
    texts = {path: _read(sandbox, path) for path in expected}
    if all(text is not None and text.strip() == expected[path].strip() for path, text in texts.items()):
        gone = task.metadata.get("gone", ())
        kept = {path: None if path in gone else text for path, text in task.files.items() if path not in expected}
        return 1.0 if all(_read(sandbox, path) == text for path, text in kept.items()) else 0.2
    credits = [_credit(text, task.files.get(path), expected[path]) for path, text in texts.items()]
    return sum(credits) / len(credits)


def _credit(text: str | None, first: str | None, wanted: str) -> float:
    if text is None or text == first:
        return 0.0
    start = 0.0 if first is None else _compare(first, wanted)
    gained = max(0.0, _compare(text, wanted) - start)
    # nothing can be gained where the input is right already
    return 0.1 + 0.3 * (gained / (1.0 - start) if gained else 0.0)


def _compare(text: str, wanted: str) -> float:
    return SequenceMatcher(None, text.strip(), wanted.strip()).ratio()


def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        content = sandbox.get(path, max_bytes=4096)
    except FileTooLargeError:
        # there and wrong, since no answer is that long: the agent's failure, not the grader's
        return TOO_LONG
    return None if content is None else content.decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="copy_command,copy_file", help="of " + ", ".join([*FAMILIES, *KINDS]))
    parser.add_argument("--num", type=int, default=96, help="how many tasks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--split", choices=get_args(Split), help="no task shares an answer with one of the other split"
    )
    parser.add_argument("--without", type=Path, metavar="FILE", help="JSONL file of tasks that are not to come again")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    try:
        without = [] if args.without is None else load_tasks(args.without)
        tasks = build_tasks(args.kinds.split(","), args.num, args.seed, without, args.split)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        save_tasks(args.output, tasks)
    except (ConfigError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
