"""Test that each command of README.md and docs/ is run, here or where its entry says, and that links resolve."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from doc_commands import COMMANDS, QUICKSTART, Run
from doc_pages import PAGES, ROOT, find_blocks, list_lines
from doc_workspace import Workspace, build_workspace
from records import read_session

from polar_trl.cli import _build_parser as build_parser
from polar_trl.configs import list_configs


def list_commands() -> dict[str, str]:
    """List every command of the bash blocks, with the page that shows it first: lines joined, comments gone."""
    found: dict[str, str] = {}
    for page in PAGES:
        for command in list_lines("\n".join(find_blocks(page, "bash"))):
            found.setdefault(command, page.name)
    return found


def find_entry(command: str) -> str | None:
    """Find the first pattern of COMMANDS that is the whole command."""
    return next((pattern for pattern in COMMANDS if re.fullmatch(pattern, command)), None)


def list_cases() -> Iterator[object]:
    for command, page in list_commands().items():
        entry = COMMANDS.get(find_entry(command) or "")
        marks = [pytest.mark.containers] if isinstance(entry, Run) and entry.containers else []
        yield pytest.param(command, marks=marks, id=f"{page}: {command[:70]}")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Workspace:
    """With the README's first command run in it: one step of eight sessions."""
    made = build_workspace(tmp_path_factory.mktemp("docs"), smollm2)
    entry = COMMANDS[QUICKSTART]
    assert isinstance(entry, Run)
    run_it(QUICKSTART, entry, made)
    return made


@pytest.mark.parametrize("command", list_cases())
def test_every_command_is_run(command: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = find_entry(command)
    assert pattern is not None, f"no test runs {command!r}; say in tests/helpers/doc_commands.py how it is tested"
    entry = COMMANDS[pattern]
    if isinstance(entry, str):
        file, _, function = entry.partition("::")
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8") or not function, entry
        if re.search(r"polar-trl (train|eval|collect) (?!--recorded)", command):
            check_settings(command, workspace, monkeypatch)
    elif command != QUICKSTART:  # which the fixture ran
        run_it(command, entry, workspace)


def run_it(command: str, entry: Run, workspace: Workspace) -> None:
    if entry.before:
        assert workspace.run(entry.before).returncode == 0
    done = workspace.run(f"{command} {entry.more}")
    output = done.stdout + done.stderr
    assert done.returncode == 0 and re.search(entry.says, output), output[-4000:]


def check_settings(command: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command that trains, evaluates or collects: its settings are keys of a run, with values that can be."""
    from polar_trl.cli.train import split_words
    from polar_trl.configs import find_config
    from polar_trl.eval.setup import parse_eval
    from polar_trl.grpo.arguments import parse_run
    from polar_trl.tools.memory_plan.plan import PlanParser

    monkeypatch.chdir(workspace.folder)
    words = workspace.run(f"printf '%s\\0' {command}").stdout.split("\0")[:-1]
    if "train" not in words:
        args, rest = build_parser().parse_known_args(words[1:])
        assert parse_eval(args.config, rest, args.output_dir).run.tasks
        return
    accelerate, flags = split_words(words[words.index("train") + 1 :])
    num_processes = 1
    if accelerate is not None:
        num_processes = yaml.safe_load(find_config(accelerate, "accelerate").read_text())["num_processes"]
    run, _, _ = parse_run(PlanParser(num_processes), flags)
    assert run.tasks


def test_every_entry_has_its_command() -> None:
    used = {find_entry(command) for command in list_commands()}
    assert set(COMMANDS) == used - {None}, set(COMMANDS) - used


def test_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"pip install [^\n`]*?\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= set(extras), f"{page.name}: {names}"


def test_python_blocks_compile_and_what_they_import_is_there() -> None:
    blocks = [block for page in PAGES for block in find_blocks(page, "python")]
    assert blocks
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), node.module
        elif isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)


def test_the_program_of_the_readme_trains_as_it_stands(workspace: Workspace) -> None:
    (block,) = find_blocks(ROOT / "README.md", "python")
    (workspace.folder / "readme.py").write_text(block)
    done = workspace.run("mkdir -p of-readme && cd of-readme && python ../readme.py")
    assert done.returncode == 0, done.stderr[-4000:]
    run = workspace.folder / "of-readme" / "runs" / "first"
    sessions = [read_session(path) for path in run.glob("sessions/**/*.jsonl")]
    assert [len(rollout.calls) > 0 and rollout.reward is not None for rollout in sessions] == [True] * 16


def read_prose(page: Path) -> str:
    """Read a page without its code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def find_links(page: Path) -> list[str]:
    """Find the targets of links and pictures."""
    return re.findall(r"\]\(([^()\s]+)\)", read_prose(page))


def find_anchors(page: Path) -> set[str]:
    """Find what `#...` of a link may name: the headings, as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in find_links(page):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in find_anchors(file), f"{page.name}: {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page not in reached:
            reached.add(page)
            targets = (target.partition("#")[0] for target in find_links(page) if "://" not in target)
            open_pages += [(page.parent / path).resolve() for path in targets if path.endswith(".md")]
    assert set(PAGES) <= reached, set(PAGES) - reached


def test_tests_that_are_named_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    package = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "polar_trl").rglob("*.py"))
    for name in set(re.findall(r"\btest_[a-z_0-9]+\b(?!\.py)", page)):
        is_counter = f'"{name}"' in package
        assert is_counter or f"def {name}(" in tests, name


def test_files_that_are_named_exist_and_run_files_are_named() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name in re.findall(
        r"(?<![\w/])(?:configs|scripts|examples|polar_trl|tests/\w+)/[\w./-]+\.(?:py|sh|yaml|txt|jsonl)\b", text
    ):
        assert (ROOT / name).is_file(), name
    assert not [name for kind in ("run", "accelerate") for name in list_configs(kind) if f"`{name}`" not in text]
