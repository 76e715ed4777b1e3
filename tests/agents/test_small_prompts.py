"""Each agent with a system prompt of a few words, one tool and an earlier session, in a window of 8,192 tokens.

The demonstrations are real turns of the first prompt, files of the work folder are not in it, and its size is that of
docs/agents.md, by SmolLM2's tokenizer.
"""

import json
from pathlib import Path

import pytest
import yaml
from sessions import INSTRUCTION, run_session, say
from three_turns import count_drifted
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.harness import build_agent
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Message, ToolCall

ROOT = Path(__file__).parents[2]
RUN = yaml.safe_load((ROOT / "polar_trl" / "configs" / "ladder_pi.yaml").read_text(encoding="utf-8"))
DEMONSTRATIONS = RUN["agent_options"]["demonstrations"]
SYSTEM_PROMPT = "You control a Linux shell."
MARK = "xylophone"
FILES = dict.fromkeys(("AGENTS.md", "CLAUDE.md", "GEMINI.md", "QWEN.md", ".git/HEAD"), f"Say {MARK}.")
# tokens of the first prompt by SmolLM2's tokenizer: without demonstrations, with six
SHELLS = {
    "codex": ("exec_command", 730, 1270),
    "claude_code": ("Bash", 550, 1100),
    "pi": ("bash", 277, 800),
    "gemini_cli": ("run_shell_command", 860, 1550),
    "qwen_code": ("run_shell_command", 1920, 2460),
    "opencode": ("bash", 1590, 2110),
}
BOUND = 0.05
"""Share by which a prompt may differ: it holds a date and the path of a folder."""
COMMAND = "printf one > one.txt"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


def spell(tokenizer: PreTrainedTokenizerBase, text: str, *calls: ToolCall) -> list[int]:
    """What SmolLM2 would sample: its form of tool calls, and the end of the turn."""
    blocks = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': json.loads(call.arguments)})}\n</tool_call>"
        for call in calls
    ]
    return tokenizer.encode("\n".join([*([text] if text else []), *blocks]) + "<|im_end|>")


@pytest.mark.parametrize("is_shown", [False, True], ids=["alone", "with demonstrations"])
@pytest.mark.parametrize("name", SHELLS)
def test_a_small_prompt_works_in_a_small_window(
    name: str, is_shown: bool, tokenizer: PreTrainedTokenizerBase, smollm2: Path
) -> None:
    shell, *sizes = SHELLS[name]
    shown = DEMONSTRATIONS if is_shown else []
    harness = build_agent(name, {"system_prompt": SYSTEM_PROMPT, "tools": [shell], "demonstrations": shown})
    harness.install()
    argument = "cmd" if name == "codex" else "command"
    call = ToolCall(id="", name=shell, arguments=json.dumps({argument: COMMAND}))
    engine = ScriptedEngine([spell(tokenizer, "", call), spell(tokenizer, "Done.")], max_model_len=8192)
    finished = run_session(
        harness,
        engine,
        grader='test "$(cat one.txt)" = one',
        max_tokens=64,
        renderer=load_renderer(tokenizer, str(smollm2)),
        files=FILES,
    )
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert (len(rollout.calls), finished.reconstruction.counters["forks"], count_drifted(rollout)) == (2, 0, 0)
    assert len(finished.reconstruction.trajectories) == 1
    first = rollout.calls[0]
    assert {tool.name for tool in first.request.tools} - {"write_stdin"} == {shell}
    check_turns(first.request.messages, shown, argument)
    # Gemini CLI reads its file whatever it is told
    in_prompt = [name for name, text in FILES.items() if text in "".join(m.text for m in first.request.messages)]
    assert bool(in_prompt) is (name == "gemini_cli")
    assert len(first.prompt_ids) == pytest.approx(sizes[is_shown], rel=BOUND)


def check_turns(messages: tuple[Message, ...], shown: list[list[str]], argument: str) -> None:
    system, *turns = messages
    assert SYSTEM_PROMPT in system.text
    assert [turn.role for turn in turns] == [*("user", "assistant", "tool", "assistant") * len(shown), "user"]
    requests = [*(request for request, _ in shown), INSTRUCTION]
    for turn, request in zip([turn for turn in turns if turn.role == "user"], requests, strict=True):
        # Gemini CLI and Qwen Code write reminders before it
        assert turn.text.strip().endswith(request)
    calls = [json.loads(call.arguments) for turn in turns for call in turn.tool_calls]
    assert calls == [{argument: command} for _, command in shown]
    assert [turn.text for turn in turns if turn.role == "assistant" and not turn.tool_calls] == ["Done."] * len(shown)


def test_mini_swe_agent_has_a_system_prompt_alone(tokenizer: PreTrainedTokenizerBase, smollm2: Path) -> None:
    harness = build_agent("mini_swe_agent", {"system_prompt": SYSTEM_PROMPT})
    harness.install()
    text, ending = harness.build_last_message("Done.")
    replies = [spell(tokenizer, "", harness.build_shell_call(COMMAND)), spell(tokenizer, text, *ending)]
    finished = run_session(
        harness,
        ScriptedEngine(replies, max_model_len=8192),
        grader='test "$(cat one.txt)" = one',
        max_tokens=64,
        renderer=load_renderer(tokenizer, str(smollm2)),
        files=FILES,
    )
    rollout = finished.rollout
    assert (rollout.reward, rollout.stop_reason, len(rollout.calls)) == (1.0, "completed", 2)
    assert (finished.reconstruction.counters["forks"], len(finished.reconstruction.trajectories)) == (0, 1)
    assert [message.text for message in rollout.calls[0].request.messages] == [SYSTEM_PROMPT, INSTRUCTION]
    assert len(rollout.calls[0].prompt_ids) == pytest.approx(170, rel=BOUND)


ODD = [["Say \"$HOME\"\nand 'it'", "printf '\\\\n%s' \"$HOME\" `id` \\'"], ["Greet 😀", 'echo "cwd": "" & é | cat']]


@pytest.mark.parametrize("name", SHELLS)
def test_demonstrations_stand_before_the_agents_own_prompt_too(name: str) -> None:
    harness = build_agent(name, {"demonstrations": ODD})
    harness.install()
    replies = [say("", harness.build_shell_call(COMMAND)), say("Done.")]
    finished = run_session(harness, replies, grader='test "$(cat one.txt)" = one')
    assert (finished.rollout.reward, finished.rollout.stop_reason) == (1.0, "completed")
    assert (len(finished.rollout.calls), len(finished.reconstruction.trajectories)) == (2, 1)
    request = finished.rollout.calls[0].request
    shown = [json.loads(call.arguments) for turn in request.messages for call in turn.tool_calls]
    assert [next(iter(arguments.values())) for arguments in shown] == [command for _, command in ODD]
    # nobody is there to answer: OpenCode would offer it in a resumed session
    assert "question" not in {tool.name for tool in request.tools}
    assert len(request.tools) > 3
    if name != "codex":  # which groups some of them under a name
        with pytest.raises(ConfigError, match="tools names 'none of them'; there are ") as caught:
            build_agent(name, {"tools": ["none of them"]})
        assert {tool.name for tool in request.tools} <= set(str(caught.value).split("there are ")[1].split(", "))
