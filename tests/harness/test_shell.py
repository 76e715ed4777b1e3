"""The shell harness hands the agent its task byte for byte, through a real sandbox."""

import hashlib
import json
from pathlib import Path

import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.harness.base import MAX_ARGUMENT_BYTES, require_launch
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.setup.agents import build_harness
from polar_trl.setup.run_setup import RunArguments
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import ChatRequest, Endpoint, Task, Tool

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


def test_a_file_of_this_machine_keeps_its_executable_bit(tmp_path: Path) -> None:
    script, settings = tmp_path / "run", tmp_path / "settings"
    script.write_text("#!/bin/sh\ntest ! -x ~/settings && test ! -x ~/text && cat ~/settings\n")
    script.chmod(0o755)
    settings.write_text("kept")
    harness = ShellHarness("~/bin/run > out", files={"bin/run": script, "settings": settings, "text": "x"})
    plan = harness.build_launch(Task(id="t", instruction="x"), ENDPOINT)
    assert (set(plan.executables), plan.files["settings"]) == ({"bin/run"}, "kept")
    with Proxy(ScriptedEngine(lambda prompt: ()), ByteRenderer(), params=GenerationParams(max_tokens=5)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(tmp_path / "boxes"),
            harness=harness,
            grader=None,
            config=RolloutConfig(),
        )
        [result] = runner.run([Job(rollout_id="r", group_id="g", task=Task(id="t", instruction="x"))])
    assert result.rollout.agent_exit is not None and result.rollout.agent_exit.exit_code == 0
    assert "+kept" in (result.rollout.changes or "")


def test_files_of_a_run_keep_theirs(tmp_path: Path) -> None:
    for name, mode in (("run", 0o755), ("settings", 0o644)):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(mode)
    files = [str(tmp_path / name) for name in ("run", "settings")]
    run = RunArguments(tasks="t", agent_command="~/run", agent_files=files)
    assert set(build_harness(run).build_launch(Task(id="t", instruction="x"), ENDPOINT).executables) == {"run"}


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
    assert plan.command.splitlines()[1:] == ["echo ${HOME} {a,b} | awk '{print $1}'"]


def test_only_whole_known_words_are_placeholders() -> None:
    command = "echo ${model} {x} \\'{model} | awk '{print}' | jq '{\"api_key\": .key}'"
    plan = ShellHarness(command).build_launch(Task(id="t", instruction="x"), ENDPOINT)
    assert plan.command.splitlines()[1:] == [command.replace(" \\'{model}", " \\'policy")]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("agent {instructions}", r"has \{instructions\}; did you mean \{instruction\}\? .* \{base_url\}, \{api_key\}"),
        ("agent {prompt}", r"did you mean \{instruction\}"),
        ("agent --url {BASE_URL} {instruction}", r"did you mean \{base_url\}"),
        ('agent "{instruction}"', "inside quotes"),
        ("agent 'Task: {instruction}'", "inside quotes"),
        ('agent "it\'s {instruction}"', "inside quotes"),
        ("agent '@{instruction_file}'", r'inside quotes; .* write "\$POLAR_INSTRUCTION_FILE"'),
        ("agent {instructions_file}", r"did you mean \{instruction_file\}"),
        ("agent --ctx {context_window}", r"did you mean \{max_model_len\}"),
        ("agent --max {max_token}", r"did you mean \{max_tokens\}"),
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
    with pytest.raises(ConfigError, match="task t: the instruction holds half a surrogate pair at position 1"):
        ShellHarness("run").build_launch(Task(id="t", instruction="a\ud83d"), ENDPOINT)
    with pytest.raises(ConfigError, match="auxiliary_without_tools must be true or false, not 'yes'"):
        ShellHarness("run", auxiliary_without_tools="yes")  # type: ignore[arg-type]


def test_the_limits_and_the_file_are_placeholders_and_variables(tmp_path: Path) -> None:
    harness = ShellHarness(
        "python3 -I ~/show.py {instruction_file} {max_model_len} {max_tokens}", files={"show.py": PRINT}
    )
    (file, *limits), env = launch(tmp_path, harness, Task(id="t", instruction="x"))
    assert limits == ["32768", "8192"] == [env["POLAR_MAX_MODEL_LEN"], env["POLAR_MAX_TOKENS"]]
    assert file == env["POLAR_INSTRUCTION_FILE"] == f"{env['HOME']}/.polar/instruction.txt"


@pytest.mark.parametrize("word", ["{instruction_file}", '"$POLAR_INSTRUCTION_FILE"', '"$(echo {instruction_file})"'])
@pytest.mark.parametrize("instruction", ["\r\n 'x' ", "é\n" * 70_000, "'" * 5_000_000], ids=["short", "long", "huge"])
def test_a_file_holds_an_instruction_of_any_length(tmp_path: Path, word: str, instruction: str) -> None:
    assert digest_in_sandbox(tmp_path, f"sha256sum < {word}", instruction) == digest(instruction)


@pytest.mark.parametrize("instruction", ["a" * MAX_ARGUMENT_BYTES, "it's " * 26_000, "'" * MAX_ARGUMENT_BYTES])
def test_an_argument_may_be_as_long_as_the_kernel_takes_it(tmp_path: Path, instruction: str) -> None:
    assert digest_in_sandbox(tmp_path, "printf %s {instruction} | sha256sum", instruction) == digest(instruction)
    words = "python3 -c 'import sys; sys.stdout.write(sys.argv[1])' {instruction} | sha256sum"
    assert digest_in_sandbox(tmp_path, words, instruction) == digest(instruction)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_in_sandbox(tmp_path: Path, command: str, instruction: str) -> str:
    """The first word that the command prints."""
    task = Task(id="t", instruction=instruction)
    plan = ShellHarness(command).build_launch(task, ENDPOINT)
    sandbox = LocalSandboxBackend(tmp_path).create(task, "s")
    for path, text in plan.files.items():
        sandbox.put(f"~/{path}", text.encode())
    result = sandbox.run(plan.command, env=plan.env, timeout_s=60)
    sandbox.destroy()
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.split()[0]


@pytest.mark.parametrize(
    "command",
    ["agent {instruction}", "agent", 'agent "$POLAR_INSTRUCTION"', "agent {instruction} {instruction_file}"],
)
def test_an_instruction_that_no_argument_can_carry_needs_a_file(command: str) -> None:
    tasks = [Task(id="short", instruction="x"), Task(id="long", instruction="é" * (MAX_ARGUMENT_BYTES // 2 + 1))]
    with pytest.raises(ConfigError, match=r"task long: the instruction has 130050 bytes.* write \{instruction_file\}"):
        require_launch(ShellHarness(command), tasks)


def test_a_file_of_its_own_may_read_the_variable() -> None:
    harness = ShellHarness("python3 ~/a.py", files={"a.py": "open(os.environ['POLAR_INSTRUCTION_FILE'])"})
    plan = harness.build_launch(Task(id="t", instruction="x" * 200_000), ENDPOINT)
    assert "POLAR_INSTRUCTION" not in plan.env and len(plan.command) < 200


def test_requests_without_tools_are_auxiliary_where_that_was_said() -> None:
    title, work = ChatRequest(messages=()), ChatRequest(messages=(), tools=(Tool(name="bash"),))
    for said, purposes in ((False, ["policy", "policy"]), (True, ["auxiliary", "policy"])):
        harness = ShellHarness("agent", auxiliary_without_tools=said)
        assert [harness.classify(request) for request in (title, work)] == purposes
