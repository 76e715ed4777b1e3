#!/usr/bin/env python3
"""Measure the size, structure and language of the package, and hold them to the limits of CONTRIBUTING.md.

    python scripts/dev/measure_code.py                           a Markdown table
    python scripts/dev/measure_code.py --against OTHER/CHECKOUT  two columns: that one, this one
    python scripts/dev/measure_code.py --check                   only what breaks a limit; exit code 1 if anything does

Lines are those of Python files, blank ones and comments included. A function's begin at its `def`.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = "polar_trl"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Measure(NamedTuple):
    """One figure of a checkout, and what was counted by name where a limit can be broken."""

    text: str
    limit: str = ""
    is_broken: bool = False
    found: Sequence[str] = ()


def measure(tree: Path) -> dict[str, Measure]:
    """Parse every module of a checkout's package."""
    package = tree / PACKAGE
    texts = {path.relative_to(tree): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    modules = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    longest = max(lines, key=lines.__getitem__)
    too_long = [f"{path}: {count} lines" for path, count in lines.items() if count > 450]
    nodes = [(path, node) for path, module in modules.items() for node in ast.walk(module)]
    functions = [(path, node) for path, node in nodes if isinstance(node, _Function)]
    classes = [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]
    long = [f"{p}:{f.lineno} {f.name}" for p, f in functions if (f.end_lineno or 0) - f.lineno >= 60]
    big = [f"{p}:{c.lineno} {c.name}" for p, c in classes if sum(isinstance(n, _Function) for n in c.body) > 20]
    public = [node for _, node in [*functions, *classes] if not node.name.startswith("_")]
    documented = 100 * sum(ast.get_docstring(node) is not None for node in public) / len(public)
    heads = [ast.get_docstring(module) or "" for module in modules.values()]
    no_verb = [node for _, node in functions if re.match(r"(What|Whether|How|Where)\b", ast.get_docstring(node) or "")]
    rooms: Counter[str] = Counter()
    for path, count in lines.items():
        rooms[path.parts[1] + "/" if len(path.parts) > 2 else "*.py"] += count
    by_name = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): m for path, m in modules.items()}
    return {
        f"modules directly in {PACKAGE}/": _at_most(8, _list_modules(package)),
        f"modules directly in {PACKAGE}/grpo/": _at_most(16, _list_modules(package / "grpo")),
        "lines of the longest file": Measure(
            f"{lines[longest]} ({longest.name})", "at most 450", lines[longest] > 450, too_long
        ),
        "functions over 60 lines": _at_most(0, long),
        "classes over 20 methods": _at_most(0, big),
        "import cycles": _at_most(0, find_cycles(by_name)),
        "public names with a docstring": Measure(f"{documented:.1f} %", "at least 85 %", documented < 85),
        'module docstrings that say "refuses"': Measure(str(sum("refuses" in head.lower() for head in heads))),
        'module docstrings with "->" in the first line': Measure(str(sum("->" in h.split("\n")[0] for h in heads))),
        "function docstrings that open with What, Whether, How or Where": Measure(str(len(no_verb))),
        **{f"lines of {name}/": Measure(f"{_count_lines(tree / name):,}") for name in (PACKAGE, "scripts", "tests")},
        **{f"lines of {PACKAGE}/{room}": Measure(f"{count:,}") for room, count in sorted(rooms.items())},
    }


def find_cycles(modules: Mapping[str, ast.Module]) -> list[str]:
    """Name the strongly connected components of more than one module in the graph of imports at module level."""
    imports = {name: set(_find_imports(module.body, modules)) - {name} for name, module in modules.items()}
    reached: dict[str, set[str]] = {}
    for name in modules:
        todo, reached[name] = [name], set()
        while todo:
            new = imports[todo.pop()] - reached[name]
            reached[name] |= new
            todo += new
    # two modules that reach each other are in one component
    components = {frozenset(b for b in reached[a] if a in reached[b]) for a in modules}
    return sorted(" <-> ".join(sorted(component)) for component in components if component)


def _find_imports(body: Iterable[ast.AST], known: Mapping[str, ast.Module]) -> Iterator[str]:
    """Modules of `known` that statements import when they run, without those for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else str(node.module) for name in members)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _find_imports(node.orelse, known)
        elif not isinstance(node, _Function):
            yield from _find_imports(ast.iter_child_nodes(node), known)


def _list_modules(folder: Path) -> list[str]:
    return [path.name for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]


def _count_lines(folder: Path) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob("*.py"))


def _at_most(limit: int, found: list[str]) -> Measure:
    return Measure(str(len(found)), f"at most {limit}", len(found) > limit, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    this = Path(__file__).resolve().parents[2]
    parser.add_argument("--tree", type=Path, default=this, help="the checkout to measure (default: this one)")
    parser.add_argument("--against", type=Path, help="another checkout, for a column before this one")
    parser.add_argument("--check", action="store_true", help="print what breaks a limit, and exit with 1 if anything")
    args = parser.parse_args()
    for tree in filter(None, (args.tree, args.against)):
        if not (tree / PACKAGE / "grpo").is_dir():
            parser.error(f"{tree} has no {PACKAGE}/grpo/; give the root of a checkout")
    measures = measure(args.tree)
    if args.check:
        broken = {name: found for name, found in measures.items() if found.is_broken}
        for name, found in broken.items():
            print(f"{name}: {found.text}, {found.limit}", *found.found, sep="\n    ")
        sys.exit(1 if broken else 0)
    columns = ({"before": measure(args.against)} if args.against else {}) | {"now": measures}
    print("| measure |", " | ".join(columns), "| limit |\n|" + "---|" * (len(columns) + 2))
    for name in dict.fromkeys([*measures, *columns.get("before", {})]):
        cells = [column[name].text if name in column else "-" for column in columns.values()]
        print("|", " | ".join([name, *cells, measures[name].limit if name in measures else ""]), "|")


if __name__ == "__main__":
    main()
