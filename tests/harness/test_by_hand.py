"""The settings that `polar-trl serve` prints, pasted into a shell: each agent answers with what the policy says."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from serving import RENDERER, new_log, serve

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.by_hand import list_settings
from polar_trl.harness.install import NODE
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn
from polar_trl.types import Endpoint, Message, Task

WORD = "Marzipan."
# name of its settings -> name of its harness, its dialect, and what a person types after the settings for one answer
HEADLESS = {
    "Codex": ("codex", "openai_responses", "exec --skip-git-repo-check 'Say a word.'"),
    "Claude Code": ("claude_code", "anthropic", "-p 'Say a word.'"),
    "Gemini CLI": ("gemini_cli", "google", "--skip-trust -p 'Say a word.'"),
    "Qwen Code": ("qwen_code", "openai_chat", "-p 'Say a word.'"),
    "Pi": ("pi", "openai_chat", "-p 'Say a word.'"),
    "OpenCode": ("opencode", "openai_chat", "run 'Say a word.'"),
    "mini-swe-agent": ("mini_swe_agent", "openai_chat", "--yolo --exit-immediately -t 'Say a word.'"),
}


def find_program(harness_name: str) -> Path:
    """The folder of the program that the harness starts."""
    endpoint = Endpoint(origin="http://127.0.0.1:1", api_key="k", model="policy")
    launch = build_agent(harness_name).build_launch(Task(id="t", instruction="x"), endpoint)
    words = [word for line in launch.command.splitlines() for word in shlex.split(line, posix=True)]
    program = next(Path(word) for word in words if word.startswith("/") and os.access(word, os.X_OK))
    return program.parent


def test_each_agent_has_settings() -> None:
    assert {harness for harness, _, _ in HEADLESS.values()} == set(AGENTS)


@pytest.mark.parametrize("name", HEADLESS)
def test_an_agent_answers_from_the_settings_alone(name: str, tmp_path: Path) -> None:
    harness_name, dialect, arguments = HEADLESS[name]
    harness = build_agent(harness_name)
    harness.install()
    text, tool_calls = harness.build_last_message(WORD)
    engine = ScriptedEngine(
        answer_by_turn([Message(role="assistant", text=text, tool_calls=tool_calls)]), max_model_len=MAX_MODEL_LEN
    )
    home = tmp_path / "home"
    work = tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    with serve(engine, RENDERER, params=GenerationParams(max_tokens=2000), live=True) as proxy:
        endpoint = proxy.open_session(log := new_log())
        (settings,) = [one for one in list_settings(endpoint, tmp_path / "agents") if one.name == name]
        for path, content in settings.files.items():
            target = tmp_path / "agents" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
        path = f"{find_program(harness_name)}:{NODE.program.parent}:/usr/bin:/bin"
        done = subprocess.run(
            ["bash", "-c", f"{settings.command} {arguments}"],
            cwd=work,
            env={"HOME": str(home), "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    said = done.stdout + done.stderr
    assert WORD in done.stdout and done.returncode == 0, said[-3000:]
    assert {call.dialect for call in log.calls} == {dialect}, said[-3000:]


def test_exports_reach_the_clients_of_each_dialect(tmp_path: Path) -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:8642", api_key="polar-k.a'b", model="policy")
    exports = [one.command for one in list_settings(endpoint, tmp_path) if one.command.startswith("export ")]
    assert len(exports) == 3
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*exports, "env"])], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    values = dict(line.split("=", 1) for line in shown.stdout.splitlines())
    assert values["OPENAI_BASE_URL"] == "http://127.0.0.1:8642/v1"
    assert values["ANTHROPIC_BASE_URL"] == values["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8642"
    assert {values[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")} == {endpoint.api_key}


def test_no_agent_is_told_to_act_without_asking(tmp_path: Path) -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:8642", api_key="polar-key", model="policy")
    for one in list_settings(endpoint, tmp_path):
        text = one.command + "".join(one.files.values())
        for word in ("danger", "never", "yolo", "permission", "bypass", "IS_SANDBOX"):
            assert word not in text, (one.name, word)


def test_an_agent_that_cannot_fit_the_window_says_so_in_a_comment(tmp_path: Path) -> None:
    endpoint = Endpoint(origin="http://127.0.0.1:8642", api_key="polar-key", model="policy", max_model_len=1024)
    settings = {one.name: one for one in list_settings(endpoint, tmp_path)}
    assert settings["Pi"].command.startswith("# ") and "1024" in settings["Pi"].command
    assert not settings["Pi"].files
    for one in settings.values():
        done = subprocess.run(["bash", "-n", "-c", one.command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
