"""Play solutions: the turn, the form of the call, and one sentence where it cannot be done."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import TOOLED, build_tokenizer
from transformers import AutoTokenizer

from polar_trl.cli import main
from polar_trl.configs import find_config
from polar_trl.engine.base import GenerationParams
from polar_trl.errors import ConfigError, WireError
from polar_trl.eval.open_model import open_solutions, prepare_model
from polar_trl.eval.setup import name_model, parse_eval
from polar_trl.eval.solutions import SolutionEngine
from polar_trl.grpo.resume.model_folder import Checkpoint
from polar_trl.harness import build_agent
from polar_trl.harness.pi import PiHarness
from polar_trl.harness.shell import ShellHarness
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.types import ChatRequest, Completion, Message, Task, Tool

TASK = Task(id="a", instruction="Create sun.txt", metadata={"gold": "touch sun.txt"})
LONGER = Task(id="b", instruction="Create sun.txt and moon.txt", metadata={"gold": "touch sun.txt moon.txt"})


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> Renderer:
    return load_renderer(AutoTokenizer.from_pretrained(smollm2), str(smollm2))


def build_tool(name: str, *required: str) -> Tool:
    return Tool(name=name, parameters={"type": "object", "properties": {}, "required": list(required)})


def answer(renderer: Renderer, harness: Any, request: ChatRequest, max_tokens: int = 64) -> Message:
    engine = SolutionEngine([TASK, LONGER], harness, renderer, max_model_len=8192)
    prompt = renderer.render(request.messages, request.tools)
    completion = asyncio.run(engine.answer(request, prompt, GenerationParams(max_tokens=max_tokens)))
    assert isinstance(completion, Completion) and completion.token_ids[-1] in renderer.stop_token_ids
    return renderer.parse(prompt, completion.token_ids, request.tools)


def ask(text: str, *later: Message, tools: tuple[Tool, ...]) -> ChatRequest:
    """A request after a demonstration."""
    earlier = (Message(role="user", text="Create box.txt"), Message(role="assistant", text="Done."))
    return ChatRequest(messages=(*earlier, Message(role="user", text=text), *later), tools=tools)


@pytest.mark.parametrize(
    ("agent", "tool", "arguments"),
    [
        ("pi", build_tool("bash", "command"), '{"command": "touch sun.txt moon.txt"}'),
        ("codex", build_tool("exec_command", "cmd"), '{"cmd": "touch sun.txt moon.txt"}'),
        # without the description that its own shell call has, and which the tool does not require
        ("claude_code", build_tool("Bash", "command"), '{"command": "touch sun.txt moon.txt"}'),
        ("qwen_code", build_tool("run_shell_command", "command"), '{"command": "touch sun.txt moon.txt"}'),
    ],
)
def test_a_call_and_a_last_word(renderer: Renderer, agent: str, tool: Tool, arguments: str) -> None:
    harness = build_agent(agent, {})
    # among context of the agent's own; the longer instruction holds the shorter one
    request = ask("<context/>\nCreate sun.txt and moon.txt", tools=(tool,))
    reply = answer(renderer, harness, request)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [(tool.name, arguments)]
    result = Message(role="tool", text="(no output)", tool_call_id=reply.tool_calls[0].id)
    last = answer(renderer, harness, replace(request, messages=(*request.messages, reply, result)))
    assert (last.text, last.tool_calls) == ("Done.", ())


def test_a_side_request_is_answered_without_a_call(renderer: Renderer) -> None:
    assert answer(renderer, PiHarness(), ask("Name this chat", tools=())).text == "Done."


def test_an_instruction_is_known_without_the_blanks_that_agents_trim(renderer: Renderer) -> None:
    task = replace(TASK, instruction=f"\n{TASK.instruction} \n")
    engine = SolutionEngine([task], PiHarness(), renderer, max_model_len=8192)
    request = ask("Create sun.txt", tools=(build_tool("bash", "command"),))
    prompt = renderer.render(request.messages, request.tools)
    completion = asyncio.run(engine.answer(request, prompt, GenerationParams(max_tokens=64)))
    assert isinstance(completion, Completion)
    assert renderer.parse(prompt, completion.token_ids, request.tools).tool_calls


def test_what_cannot_be_played(renderer: Renderer) -> None:
    tools = (build_tool("bash", "command"),)
    # no failure of an engine, after which an agent asks again for minutes
    with pytest.raises(WireError, match="holds no task's instruction"):
        answer(renderer, PiHarness(), ask("Something else", tools=tools))
    with pytest.raises(WireError, match=r"a reply of \d+ tokens .* does not fit max_completion_length \(8\)"):
        answer(renderer, PiHarness(), ask("Create sun.txt", tools=tools), max_tokens=8)

    def build(*tasks: Task, harness: Any = None) -> None:
        SolutionEngine(tasks, harness or PiHarness(), renderer, max_model_len=8192)

    with pytest.raises(ConfigError, match="task 'c' has none; give a shell command as `gold` of its metadata"):
        build(TASK, Task(id="c", instruction="x"))
    with pytest.raises(ConfigError, match="task 'd' has the instruction of another with another solution"):
        build(TASK, replace(LONGER, id="d", instruction=TASK.instruction))
    with pytest.raises(ConfigError, match="how shell calls its shell tool is not known"):
        build(TASK, harness=ShellHarness("my-agent {instruction}"))


def test_a_template_that_opens_reasoning_and_writes_none_is_refused() -> None:
    """What it writes of a reply is then nothing that the model could sample there."""
    opening = "<|im_start|>assistant\n"
    template = TOOLED.replace(f"{opening}{{% endif %}}", f"{opening}<think>\n{{% endif %}}")
    tokenizer = build_tokenizer(template)
    with pytest.raises(WireError, match="behind its own opening of one; if that opens reasoning, try"):
        answer(load_renderer(tokenizer, "x"), PiHarness(), ask("Create sun.txt", tools=()))


def test_a_server_beside_solutions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--solutions", "true", "--base_url", "http://127.0.0.1:9/v1", "--output_dir", str(tmp_path / "out")]
    assert main(["eval", "--config", "small/pi", *arguments]) == 2
    assert "solutions samples nothing; leave base_url out" in capsys.readouterr().err


def test_of_the_model_only_the_tokenizer_is_read(tmp_path: Path, smollm2: Path) -> None:
    setup = parse_eval(find_config("small/pi"), ["--solutions", "true"], tmp_path)
    adapter = Checkpoint(name="runs/pi/checkpoint-7", identity="checkpoint-7 0", base=str(smollm2))
    assert prepare_model(setup, adapter) == str(smollm2)  # nothing is merged
    assert name_model(replace(setup, model="/home/me/tiny")) == "the tasks' solutions, spelled by tiny"
    setup.args.vllm_max_model_length = None
    with (
        pytest.raises(ConfigError, match=r"solutions loads no model .*; give vllm_max_model_length"),
        open_solutions(setup, str(smollm2), PiHarness(), [TASK]),
    ):
        pass
