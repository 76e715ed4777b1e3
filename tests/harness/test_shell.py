"""The shell harness hands the agent its task byte for byte, through a real sandbox."""

import json
from pathlib import Path

import pytest

from polar_trl.errors import ConfigError
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Endpoint, Task

ENDPOINT = Endpoint(origin="http://127.0.0.1:4711", api_key="sk-1", model="policy")
PRINT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def launch(tmp_path: Path, harness: ShellHarness, task: Task) -> tuple[list[str], dict[str, str]]:
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    plan = harness.build_launch(task, ENDPOINT)
    for path, text in plan.files.items():
        sandbox.put(f"~/{path}", text.encode())
    result = sandbox.run(plan.command, env=plan.env, timeout_s=20)
    sandbox.destroy()
    assert result.exit_code == 0, result.stderr
    arguments, env = json.loads(result.stdout)
    return arguments, env


@pytest.mark.parametrize(
    "instruction",
    ["plain", 'it\'s "quoted" $(touch owned) `id` ${HOME}', "--help", "line\nbreak\ttab\\", "naïve 日本 {model} 🙂"],
)
def test_the_instruction_arrives_as_it_is(tmp_path: Path, instruction: str) -> None:
    harness = ShellHarness("python3 -I ~/show.py {instruction}", files={"show.py": PRINT})
    arguments, env = launch(tmp_path, harness, Task(id="t", instruction=instruction))
    assert arguments == [instruction]
    assert env["POLAR_INSTRUCTION"] == instruction


def test_every_provider_points_at_the_policy(tmp_path: Path) -> None:
    harness = ShellHarness(
        "python3 -I ~/show.py {model} {base_url} {api_key}", files={"show.py": PRINT}, env={"X": "1"}
    )
    arguments, env = launch(tmp_path, harness, Task(id="t", instruction="x"))
    assert arguments == ["policy", "http://127.0.0.1:4711/v1", "sk-1"]
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == "http://127.0.0.1:4711/v1"
    assert env["ANTHROPIC_BASE_URL"] == env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:4711"
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY", "GOOGLE_API_KEY")
    assert {env[key] for key in keys} == {"sk-1"}
    assert env["X"] == "1"


def test_braces_of_the_shell_are_left_alone() -> None:
    plan = ShellHarness("echo ${HOME} {a,b} | awk '{print $1}'").build_launch(Task(id="t", instruction="x"), ENDPOINT)
    assert plan.command == "echo ${HOME} {a,b} | awk '{print $1}'"


def test_only_whole_known_words_are_placeholders() -> None:
    command = "echo ${model} {x} \\'{model} | awk '{print}' | jq '{\"api_key\": .key}'"
    plan = ShellHarness(command).build_launch(Task(id="t", instruction="x"), ENDPOINT)
    assert plan.command == command.replace(" \\'{model}", " \\'policy")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("agent {instructions}", r"has \{instructions\}; did you mean \{instruction\}\? .* \{base_url\}, \{api_key\}"),
        ("agent {prompt}", r"did you mean \{instruction\}"),
        ("agent --url {BASE_URL} {instruction}", r"did you mean \{base_url\}"),
        ('agent "{instruction}"', "inside quotes"),
        ("agent 'Task: {instruction}'", "inside quotes"),
        ('agent "it\'s {instruction}"', "inside quotes"),
    ],
)
def test_commands_that_would_not_do_what_they_say(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShellHarness(command)


@pytest.mark.parametrize("before", ["'a b'", '"a\'b"', "a\\'b", '"a\\"b"'])
def test_quotes_before_the_instruction_are_fine(tmp_path: Path, before: str) -> None:
    harness = ShellHarness(f"python3 -I ~/show.py {before} {{instruction}}", files={"show.py": PRINT})
    arguments, _ = launch(tmp_path, harness, Task(id="t", instruction="$(id) 'x'"))
    assert arguments[1:] == ["$(id) 'x'"]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="command is empty"):
        ShellHarness("  ")
    with pytest.raises(ConfigError, match="task t: the instruction holds a NUL byte"):
        ShellHarness("run").build_launch(Task(id="t", instruction="a\0b"), ENDPOINT)
