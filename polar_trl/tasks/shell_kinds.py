"""Generators of small shell tasks: the ladder's kinds, and four families that ask for different work.

The families are files (move and join), search (find lines and names), edit (change a file in place) and fix (run a
script, and repair it first), each with levels that get harder. A generator draws one task: its instruction, one shell
command that solves it (`gold`), the input `files`, the `expected` files with their texts, and `gone`, the inputs that
must not be there in the end.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WORDS = (
    *("red", "blue", "cat", "dog", "sun", "moon", "tree", "fish", "bird", "lake", "road", "hill", "snow", "rain"),
    *("gold", "iron", "salt", "bread", "milk", "stone", "river", "cloud", "apple", "lemon", "horse", "tiger"),
    *("north", "south", "piano", "cello"),
)
TYPOS = {"echo": "ehco", "expr": "exrp", "head": "haed"}
"""Commands of the scripts to repair, and how they are misspelled there."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task: how hard it is (within its family), and what draws one."""

    level: int
    make: Callable[[random.Random], dict[str, Any]]
    family: str | None = None
    """None: a rung of the ladder."""


# The ladder


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


# Files


def _rename(rng: random.Random) -> dict[str, Any]:
    source, target, *words = rng.sample(WORDS, 5)
    text = " ".join(words)
    return {
        "instruction": f"Use mv to rename {source}.txt to {target}.txt",
        "gold": f"mv {source}.txt {target}.txt",
        "files": {f"{source}.txt": text + "\n"},
        "expected": {f"{target}.txt": text},
        "gone": [f"{source}.txt"],
    }


def _join(rng: random.Random) -> dict[str, Any]:
    first, second, target, *words = rng.sample(WORDS, 7)
    texts = " ".join(words[:2]), " ".join(words[2:])
    return {
        "instruction": f"Use cat to join {first}.txt and {second}.txt into the file {target}.txt",
        "gold": f"cat {first}.txt {second}.txt > {target}.txt",
        "files": {f"{first}.txt": texts[0] + "\n", f"{second}.txt": texts[1] + "\n"},
        "expected": {f"{target}.txt": "\n".join(texts)},
    }


def _move_into(rng: random.Random) -> dict[str, Any]:
    folder, name, *words = rng.sample(WORDS, 5)
    text = " ".join(words)
    return {
        "instruction": f"Use mkdir to make the folder {folder} and mv to move {name}.txt into it",
        "gold": f"mkdir {folder} && mv {name}.txt {folder}",
        "files": {f"{name}.txt": text + "\n"},
        "expected": {f"{folder}/{name}.txt": text},
        "gone": [f"{name}.txt"],
    }


# Search


def _find_lines(rng: random.Random) -> dict[str, Any]:
    name, word, *others = rng.sample(WORDS, 9)
    lines = [f"{word} {others[0]}", f"{others[1]} {word}", f"{others[2]} {others[3]}", f"{others[4]} {others[5]}"]
    rng.shuffle(lines)
    return {
        "instruction": f"Use grep to find {word} in {name}.txt and write the lines into the file found.txt",
        "gold": f"grep {word} {name}.txt > found.txt",
        "files": {f"{name}.txt": "".join(f"{line}\n" for line in lines)},
        "expected": {"found.txt": "\n".join(line for line in lines if word in line.split())},
    }


def _count_matches(rng: random.Random) -> dict[str, Any]:
    name, word, *others = rng.sample(WORDS, 6)
    lines = [word] * rng.randint(2, 13) + [rng.choice(others) for _ in range(rng.randint(2, 8))]
    rng.shuffle(lines)
    return {
        "instruction": f"Use grep -c to count {word} in {name}.txt and write the number into the file found.txt",
        "gold": f"grep -c {word} {name}.txt > found.txt",
        "files": {f"{name}.txt": "".join(f"{line}\n" for line in lines)},
        "expected": {"found.txt": str(lines.count(word))},
    }


def _find_file(rng: random.Random) -> dict[str, Any]:
    first, second, third, word, *others = rng.sample(WORDS, 7)
    names = [first, second, third]
    place = rng.choice(names)
    return {
        "instruction": f"Use grep -l to find {word} in all files and write the name into the file found.out",
        "gold": f"grep -l {word} *.txt > found.out",
        "files": {f"{name}.txt": f"{word if name == place else rng.choice(others)}\n" for name in names},
        "expected": {"found.out": f"{place}.txt"},
    }


# Edit


def _replace(rng: random.Random) -> dict[str, Any]:
    name, old, new, *others = rng.sample(WORDS, 6)
    lines = rng.sample([old, *others], 4)
    return {
        "instruction": f"Use sed to replace {old} by {new} in the file {name}.txt",
        "gold": f"sed -i s/{old}/{new}/ {name}.txt",
        "files": {f"{name}.txt": "".join(f"{line}\n" for line in lines)},
        "expected": {f"{name}.txt": "\n".join(new if line == old else line for line in lines)},
    }


def _write_over(rng: random.Random) -> dict[str, Any]:
    """Draw the same work in the other order of words: what is copied from an example is wrong."""
    made = _replace(rng)
    _, old, new, _ = made["gold"].split()[2].split("/")
    (path,) = made["files"]
    return made | {"instruction": f"Use sed to write {new} in the place of {old} in the file {path}"}


def _delete_line(rng: random.Random) -> dict[str, Any]:
    name, word, *others = rng.sample(WORDS, 5)
    lines = rng.sample([word, *others], 4)
    return {
        "instruction": f"Use sed to delete {word} in the file {name}.txt",
        "gold": f"sed -i /{word}/d {name}.txt",
        "files": {f"{name}.txt": "".join(f"{line}\n" for line in lines)},
        "expected": {f"{name}.txt": "\n".join(line for line in lines if line != word)},
    }


# Fix


def _run_script(rng: random.Random) -> dict[str, Any]:
    name, script, text = _draw_script(rng)
    return {
        "instruction": f"Use sh to run {name}.sh and write what it prints into the file out.txt",
        "gold": f"sh {name}.sh > out.txt",
        "files": {f"{name}.sh": script},
        "expected": {"out.txt": text},
    }


def _repair(rng: random.Random) -> dict[str, Any]:
    name, script, _ = _draw_script(rng)
    command = script.partition(" ")[0]
    return {
        "instruction": f"Use sed to replace {TYPOS[command]} by {command} in the file {name}.sh",
        "gold": f"sed -i s/{TYPOS[command]}/{command}/ {name}.sh",
        "files": {f"{name}.sh": script.replace(command, TYPOS[command])},
        "expected": {f"{name}.sh": script},
    }


def _repair_and_run(rng: random.Random) -> dict[str, Any]:
    name, script, text = _draw_script(rng)
    command = script.partition(" ")[0]
    return {
        "instruction": f"Use sed to replace {TYPOS[command]} by {command} in the file {name}.sh, then use sh to run it "
        "and write what it prints into the file out.txt",
        "gold": f"sed -i s/{TYPOS[command]}/{command}/ {name}.sh && sh {name}.sh > out.txt",
        "files": {f"{name}.sh": script.replace(command, TYPOS[command])},
        "expected": {f"{name}.sh": script, "out.txt": text},
    }


def _draw_script(rng: random.Random) -> tuple[str, str, str]:
    """Draw a name, a script of one line, and what it prints, which is not simply in it."""
    name, first, second = rng.sample(WORDS, 3)
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    scripts = [
        (f"echo $(({a} + {b})) {first}\n", f"{a + b} {first}"),
        (f"expr {a} + {b}\n", str(a + b)),
        (f"head -n 1 <<END\n{first} {second}\n{second}\nEND\n", f"{first} {second}"),
    ]
    script, text = rng.choice(scripts)
    return name, script, text


KINDS: Mapping[str, Kind] = {
    "copy_command": Kind(0, _copy_command),
    "touch": Kind(0, _touch),
    "write_word": Kind(1, _write_word),
    "copy_file": Kind(1, _copy_file),
    "count_lines": Kind(2, _count_lines),
    "join": Kind(1, _join, "files"),
    "rename": Kind(2, _rename, "files"),
    "move_into": Kind(3, _move_into, "files"),
    "count_matches": Kind(1, _count_matches, "search"),
    "find_lines": Kind(2, _find_lines, "search"),
    "find_file": Kind(3, _find_file, "search"),
    "replace": Kind(1, _replace, "edit"),
    "write_over": Kind(2, _write_over, "edit"),
    "delete_line": Kind(3, _delete_line, "edit"),
    "run_script": Kind(1, _run_script, "fix"),
    "repair": Kind(2, _repair, "fix"),
    "repair_and_run": Kind(3, _repair_and_run, "fix"),
}
"""Kinds by name: the ladder's, easiest first, then the families'."""
