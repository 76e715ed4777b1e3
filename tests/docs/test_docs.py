"""Every command of README.md and docs/ is run by a test, here or where its entry says; blocks and links hold."""

import ast
import importlib
import itertools
import json
import re
import shlex
import signal
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from doc_commands import COMMANDS, QUICKSTART, Elsewhere, First, Install, Page, Run
from doc_pages import PAGES, PROGRAMS, ROOT, Block, find_anchors, find_blocks, find_links, list_commands
from doc_workspace import FIRST, ONE_STEP, PLACEHOLDERS, Workspace, build_workspace

from polar_trl.cli import SUBCOMMANDS, main
from polar_trl.cli import _build_parser as build_parser
from polar_trl.recording.log import read_session
from polar_trl.types import Task


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Workspace:
    """With the README's first command run in it: one step of eight sessions, into `runs/first`."""
    made = build_workspace(tmp_path_factory.mktemp("docs"), smollm2)
    done = made.run(f"{QUICKSTART} --steps 1 {ONE_STEP} --output_dir {FIRST}")
    assert done.returncode == 0, done.stderr[-4000:]
    made.said[QUICKSTART] = done.stdout
    return made


def find_entry(command: str) -> Run | First | Page | Elsewhere | Install:
    for pattern, entry in COMMANDS.items():
        if re.fullmatch(pattern, command):
            return entry
    raise AssertionError(
        f"no test runs {command!r}; add an entry to COMMANDS in tests/docs/doc_commands.py that says how it is tested"
    )


def list_cases() -> Iterator[object]:
    for command, page in list_commands().items():
        entry = next((entry for pattern, entry in COMMANDS.items() if re.fullmatch(pattern, command)), None)
        marks = [pytest.mark.containers] if isinstance(entry, Run) and entry.containers else []
        yield pytest.param(command, marks=marks, id=f"{page}: {command[:70]}")


@pytest.mark.parametrize("command", list_cases())
def test_every_command_is_run(command: str, request: pytest.FixtureRequest) -> None:
    entry = find_entry(command)
    match entry:
        case Run():
            run_it(command, entry, request.getfixturevalue("workspace"))
        case First():
            assert re.search(entry.says, request.getfixturevalue("workspace").said[command])
        case Page():
            open_page(command, entry, request.getfixturevalue("workspace"))
        case Elsewhere():
            find_test(entry)
            if re.search(r"scripts/train\.py|^polar-trl (eval|collect) ", command):
                check_settings(command, request.getfixturevalue("workspace"), request.getfixturevalue("monkeypatch"))
        case Install():
            check_packages(command)


def run_it(command: str, entry: Run, workspace: Workspace) -> None:
    if entry.before:
        assert workspace.run(entry.before).returncode == 0
    done = workspace.run(f"{fill_in(command)} {entry.more}")
    output = done.stdout + done.stderr
    assert done.returncode == entry.status, output[-4000:]
    assert re.search(entry.says, output), output[-4000:]


def fill_in(command: str) -> str:
    for pattern, value in PLACEHOLDERS.items():
        command = re.sub(pattern, value, command)
    return command


def open_page(command: str, entry: Page, workspace: Workspace) -> None:
    server = subprocess.Popen(
        ["bash", "-c", f"exec {fill_in(command)}"],
        cwd=workspace.folder,
        env=workspace.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0], timeout=30) as reply:
            assert entry.has in reply.read().decode()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


def find_test(entry: Elsewhere) -> None:
    """That it is there, and of the command's kind."""
    file, _, function = entry.test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert entry.names in text, f"{file} has no {entry.names!r}"
    if function:
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), f"there is no test {entry.test}"


def check_settings(command: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its settings are keys of a run, with values that can be."""
    from polar_trl.eval.setup import parse_eval
    from polar_trl.grpo.arguments import parse_run
    from polar_trl.tools.memory_plan.plan import PlanParser

    monkeypatch.chdir(workspace.folder)
    words = workspace.run(f"printf '%s\\0' {fill_in(command)}").stdout.split("\0")[:-1]
    if words[0] == "polar-trl":
        args, rest = build_parser().parse_known_args(words[1:])
        assert parse_eval(args.config, rest, args.output_dir).run.tasks
        return
    num_processes = 1
    if "--config_file" in words:
        num_processes = yaml.safe_load(Path(words[words.index("--config_file") + 1]).read_text())["num_processes"]
    run, _, _ = parse_run(PlanParser(num_processes), words[words.index("scripts/train.py") + 1 :])
    assert run.tasks


def check_packages(command: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[<>=\[]", line)[0] for group in (project["dependencies"], *extras.values()) for line in group}
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    for before, word in itertools.pairwise(words[1:]):
        ours = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if ours:
            assert set(ours[1].split(",")) <= set(extras), word
        elif before == "-c":
            assert (ROOT / word).is_file(), word
        else:
            assert word in {"-c", "-e", *known}, word


def test_extras_that_are_named_in_passing_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for page in PAGES:
        for names in re.findall(r"pip install [^\n`]*?\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= extras, f"{page.name}: {names}"


def test_every_entry_has_its_command() -> None:
    used = {
        next((pattern for pattern in COMMANDS if re.fullmatch(pattern, command)), None) for command in list_commands()
    }
    assert set(COMMANDS) == used - {None}, set(COMMANDS) - used


def list_blocks() -> list[Block]:
    return [block for page in PAGES for block in find_blocks(page)]


def test_no_command_hides_outside_of_a_bash_block() -> None:
    for block in list_blocks():
        if block.language != "bash":
            for line in block.text.splitlines():
                assert line.split(" ")[0] not in PROGRAMS, f"{block.name}: {line!r} is a command; fence it as bash"


def test_python_blocks_compile_and_what_they_import_is_there() -> None:
    blocks = [block for block in list_blocks() if block.language == "python"]
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), block.name
            elif isinstance(node, ast.Import):
                for name in node.names:
                    importlib.import_module(name.name)


def test_data_blocks_are_data() -> None:
    known = {field.name for field in fields(Task)} | {"workspace", "tests", "build_context"}
    for block in list_blocks():
        if block.language == "json":
            for row in map(json.loads, block.text.splitlines()):
                assert "instruction" not in row or set(row) <= known, block.name
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.name
        else:
            assert block.language in ("bash", "python", "text", ""), f"{block.name}: a block of {block.language}"


README_CONFIG = 'PolarGRPOConfig(output_dir="runs/mine", num_generations=8)'
README_REST = """
def my_grader(task, sandbox):
    return float(len(task.instruction) % 2)


{program}
trainer.close()
"""


def test_the_program_of_the_readme_trains(workspace: Workspace) -> None:
    (block,) = (block for block in find_blocks(ROOT / "README.md") if block.language == "python")
    assert README_CONFIG in block.text
    # what makes it small, and fit for two cores
    more = (
        "max_steps=1, per_device_train_batch_size=8, use_cpu=True, bf16=False, gradient_checkpointing=False, "
        'vllm_enable_sleep_mode=False, max_completion_length=32, vllm_max_model_length=1024, save_strategy="no", '
        'report_to="none", drop_zero_variance=False, entropy_coef=0.01'
    )
    program = block.text.replace(README_CONFIG, README_CONFIG.replace("runs/mine", "runs/api")[:-1] + f", {more})")
    (workspace.folder / "readme.py").write_text(README_REST.format(program=program))
    done = workspace.run("python readme.py")
    assert done.returncode == 0, done.stderr[-4000:]
    sessions = [read_session(path) for path in (workspace.folder / "runs" / "api").glob("sessions/**/*.jsonl")]
    assert [len(rollout.calls) > 0 for rollout in sessions] == [True] * 8


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


def test_pictures_are_used() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in find_links(page)}
    pictures = set((ROOT / "docs").rglob("*.png"))
    assert pictures <= shown, pictures - shown


def test_every_subcommand_of_the_docs_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {name for text in texts for name in re.findall(r"[`\s]polar-trl ([a-z]+(?:-[a-z]+)*)\b", text)}
    ours = {subcommand.__name__.rpartition(".")[2].replace("_", "-") for subcommand in SUBCOMMANDS}
    assert named == ours
    for name in sorted(named):
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"usage: polar-trl {name}" in capsys.readouterr().out


def test_scripts_of_the_docs_are_there_and_have_help(workspace: Workspace) -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = {name for text in texts for name in re.findall(r"\bscripts/[\w/]+\.(?:py|sh)\b", text)}
    for name in sorted(named):
        assert (ROOT / name).is_file(), name
    run = {name for command in list_commands() for name in re.findall(r"\bscripts/[\w/]+\.py\b", command)}
    for name in sorted(run):
        if "argparse" in (ROOT / name).read_text(encoding="utf-8"):
            done = workspace.run(f"python {name} --help")
            assert done.returncode == 0 and "usage:" in done.stdout, name


def test_what_it_says_when_something_is_wrong_is_what_the_code_says() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "polar_trl").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # one sentence on several lines
    page = (ROOT / "docs" / "when-something-is-wrong.md").read_text(encoding="utf-8")
    quoted = [text for line in page.splitlines() for text in re.findall(r"^\| `([^`]+)`(?:, `([^`]+)`)? \|", line)]
    texts = [text for pair in quoted for text in pair if text and "/" not in text]
    assert len(texts) > 12
    for text in texts:
        assert text in source, text


def test_every_run_file_is_in_the_docs() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [path.name for path in (ROOT / "configs").rglob("*.yaml") if path.name not in text]
    assert not missing
    for name in re.findall(r"\bconfigs/[\w./-]+\.(?:yaml|jsonl|txt|json)\b", text):
        assert (ROOT / name).is_file(), name
