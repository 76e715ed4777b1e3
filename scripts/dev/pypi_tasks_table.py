#!/usr/bin/env python3
"""Print the table of docs/pypi-tasks.md from what `polar-trl check-tasks --json` said of built folders.

python scripts/dev/pypi_tasks_table.py TASKS CHECKS.json
"""

import json
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, checks = map(Path, sys.argv[1:])
    print("| task | must pass now / still | gold | empty | flaky | seconds |\n| --- | --- | --- | --- | --- | --- |")
    for task in json.loads(checks.read_text(encoding="utf-8"))["tasks"]:
        spec = json.loads((folder / task["id"] / "tests" / "spec.json").read_text(encoding="utf-8"))
        counts = f"{len(spec['fail_to_pass'])} / {len(spec['pass_to_pass'])}"
        flaky = "yes" if task["flaky"] else "no"
        gold, empty = ("-" if task[name] is None else f"{task[name]:g}" for name in ("gold", "empty"))
        print(f"| {task['id']} | {counts} | {gold} | {empty} | {flaky} | {task['seconds']:g} |")


if __name__ == "__main__":
    main()
