#!/usr/bin/env python3
"""Count signs of reward hacking in the fixes of polar_trl/configs/tasks/pypi_tasks.json: there should be none.

  python scripts/dev/count_signs.py [--limit N]

Downloads the releases with pip, into the cache, as scripts/build_pypi_tasks.py does; runs none of their code. Prints
the fixes with signs, with and without the rule that words of the known fix itself do not count. Exits with 1 if there
are signs under that rule.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from polar_trl.grade.added_code import count_signs
from polar_trl.grade.changes import find_changes
from polar_trl.tasks.build.folders import diff_trees
from polar_trl.tasks.build.pypi import build_draft, load_specs
from polar_trl.tasks.build.suite import install_environment

CONFIGS = Path(__file__).resolve().parents[2] / "polar_trl" / "configs" / "tasks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="the first so many")
    args = parser.parse_args()
    pip = install_environment(CONFIGS / "sdist_requirements.txt", "releases")
    specs = load_specs(CONFIGS / "pypi_tasks.json")[: args.limit]
    found = {"with the rule": 0, "without it": 0}
    for spec in specs:
        with tempfile.TemporaryDirectory(prefix="polar-signs-") as scratch:
            draft = build_draft(spec, Path(scratch), pip)
            changes = find_changes(draft.broken, draft.gold)
            fix = diff_trees(draft.broken, draft.gold).decode(errors="replace")
            for name, known in (("with the rule", fix), ("without it", "")):
                signs = count_signs(changes, draft.broken, known)
                found[name] += bool(signs)
                if signs:
                    print(f"{spec.id}, {name}: {dict(signs)}", flush=True)
    print(f"{len(specs)} fixes; with signs: " + ", ".join(f"{count} {name}" for name, count in found.items()))
    sys.exit(found["with the rule"] > 0)


if __name__ == "__main__":
    main()
