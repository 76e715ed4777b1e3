"""The options of an agent's first prompt are checked alike for every agent, each with one sentence."""

import json
import os
import re
import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_trl.errors import ConfigError
from polar_trl.harness import build_agent
from polar_trl.harness.base import Launch
from polar_trl.harness.qwen_code import _LAY_EARLIER_SESSION
from polar_trl.types import Endpoint, Task

SHELLS = {
    "claude_code": "Bash",
    "codex": "exec_command",
    "gemini_cli": "run_shell_command",
    "opencode": "bash",
    "pi": "bash",
    "qwen_code": "run_shell_command",
}
OTHER = {"claude_code": "Read", "gemini_cli": "glob", "opencode": "read", "pi": "read", "qwen_code": "glob"}


def launch(name: str, **options: object) -> Launch:
    endpoint = Endpoint(origin="http://x", api_key="k", model="m", max_model_len=8192, max_tokens=64)
    return build_agent(name, options).build_launch(Task(id="t", instruction="x"), endpoint)


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"system_prompt": " "}, "system_prompt must be a text with words"),
        ({"system_prompt": 3}, "system_prompt must be a text with words in it, not 3; leave it out for"),
        ({"tools": "bash"}, r"tools must be a list such as \[\w+\], not 'bash'"),
        ({"tools": []}, r"tools must be a list such as \[\w+\], not \[\]"),
        ({"demonstrations": [["ls"]]}, r"demonstrations has \['ls'\]; each must be a request and a command"),
        ({"demonstrations": [["Look", " "]]}, "each must be a request and a command, both with words"),
        ({"demonstrations": "ls"}, "demonstrations must be a list of pairs"),
    ],
)
def test_what_is_no_text_list_or_pair_is_refused(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*{said}"):
        build_agent(name, options)


@pytest.mark.parametrize(("name", "shell"), SHELLS.items())
def test_a_tool_that_an_agent_has_not_is_named_beside_those_that_it_has(name: str, shell: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: tools names 'hammer'; there are .*{shell}, "):
        build_agent(name, {"tools": [shell, "hammer"]})


@pytest.mark.parametrize(("name", "other"), OTHER.items())
def test_demonstrations_need_the_shell_that_they_call(name: str, other: str) -> None:
    said = f"{name}: demonstrations call the tool {SHELLS[name]}, and tools are {other}; add {SHELLS[name]}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_agent(name, {"demonstrations": [["Look", "ls"]], "tools": [other]})


def test_what_codex_and_claude_code_cannot_offer_is_refused() -> None:
    with pytest.raises(ConfigError, match="codex: tools must name exec_command, which cannot be taken away"):
        build_agent("codex", {"tools": ["view_image"]})
    with pytest.raises(ConfigError, match="codex: the tool apply_patch needs a system_prompt"):
        build_agent("codex", {"tools": ["exec_command", "apply_patch"]})
    assert "--tools=Write" in launch("claude_code", tools=["Write"], max_turns=3).command
    with pytest.raises(ConfigError, match=r"claude_code: tools names 'Write'; there are Bash, Edit, Read$"):
        build_agent("claude_code", {"tools": ["Write"], "system_prompt": "Go."})


@pytest.mark.parametrize("name", SHELLS)
def test_an_emoji_as_json_writes_it_is_one_character(name: str) -> None:
    """YAML reads the two escapes as two characters, neither of which is text."""
    shown = yaml.safe_load('{"system_prompt": "Go \\ud83d\\ude00", "demonstrations": [["\\ud83d\\ude00", "ls"]]}')
    assert launch(name, **shown) == launch(name, system_prompt="Go 😀", demonstrations=[["😀", "ls"]])
    for options in ({"system_prompt": "Go \ud83d"}, {"demonstrations": [["\ud83d", "ls"]]}):
        with pytest.raises(ConfigError, match=f"^{name}: {next(iter(options))} has half a surrogate pair in "):
            build_agent(name, options)


@pytest.mark.parametrize("option", ["tools", "demonstrations"])
def test_mini_swe_agent_has_one_tool_and_no_session_to_resume(option: str) -> None:
    said = f"agent 'mini_swe_agent' has no option '{option}'; it has system_prompt, step_limit, command_timeout_s, "
    with pytest.raises(ConfigError, match=said):
        build_agent("mini_swe_agent", {option: []})
    with pytest.raises(ConfigError, match="mini_swe_agent: system_prompt must be a text with words"):
        build_agent("mini_swe_agent", {"system_prompt": ""})


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip))
def test_any_system_prompt_of_mini_swe_agent_is_a_text_of_its_template(text: str) -> None:
    files = launch("mini_swe_agent", system_prompt=text).files
    agent = yaml.safe_load(files[".polar/mini.yaml"])["agent"]
    template = jinja2.Template(agent["system_template"], undefined=jinja2.StrictUndefined)
    assert template.render() == text


@pytest.mark.parametrize("name", SHELLS)
def test_a_launch_is_the_same_each_time_and_holds_the_demonstrations_once(name: str) -> None:
    options = {"system_prompt": "Go.", "tools": [SHELLS[name]], "demonstrations": [["Look around", "ls -la /srv"]]}
    first = launch(name, **options)
    assert first == launch(name, **options)
    assert sum(text.count("Look around") for text in first.files.values()) == 1


def test_qwen_code_finds_its_session_from_any_work_folder(tmp_path: Path) -> None:
    files = launch("qwen_code", demonstrations=[["Look around", "ls"]], tools=["run_shell_command"]).files
    for name in ("plain", "R&D | a b"):
        home, work = tmp_path / f"home of {name}", tmp_path / name
        (home / ".polar").mkdir(parents=True)
        work.mkdir()
        (home / ".polar" / "earlier.jsonl").write_text(files[".polar/earlier.jsonl"])
        subprocess.run(
            ["bash", "-c", _LAY_EARLIER_SESSION],
            cwd=work,
            env={"HOME": str(home), "PATH": os.environ["PATH"]},
            check=True,
        )
        (found,) = home.glob(".qwen/projects/*/chats/*.jsonl")
        assert {json.loads(line)["cwd"] for line in found.read_text().splitlines()} == {str(work)}
