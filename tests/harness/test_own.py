"""Test that an own agent's class is loaded by its name, or that one sentence says why it is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.harness.base import Harness, Launch, require_launch
from polar_trl.harness.own import load_harness
from polar_trl.setup.agents import build_harness
from polar_trl.setup.run_setup import RunArguments
from polar_trl.types import Task
from polar_trl.user_code import is_object_name

MODULE = """
from polar_trl import Harness, Launch, ShellHarness

class Mine(Harness):
    name = "mine"
    def __init__(self, greeting, times=1):
        self.words = [greeting] * times
        if times > 9:
            raise ValueError("too often")
    def build_launch(self, task, endpoint):
        return Launch(command=" ".join(self.words))

class Bare:
    "Derived from nothing."
    name, folders = "bare", ()
    def install(self): pass
    def build_launch(self, task, endpoint): return Launch(command="true")
    def judge_exit(self, result, calls): return True
    def classify(self, request): return "policy"

class Empty(Harness):
    name = "empty"

class Nameless(Harness):
    def build_launch(self, task, endpoint): return Launch(command="true")

class Late(Harness):
    name = "late"
    def build_launch(self, task, endpoint): return "true"

class Numbers(Harness):
    name = "numbers"
    def build_launch(self, task, endpoint): return Launch(command="true", env={"MAX_TURNS": 20})

class Placed(Harness):
    name, folders = "placed", ["/opt/agent"]
    def build_launch(self, task, endpoint): return Launch(command="true")

class Quits(Harness):
    name = "quits"
    def __init__(self): raise SystemExit(3)
    def build_launch(self, task, endpoint): return Launch(command="true")

class Half:
    name = "half"
    def build_launch(self, task, endpoint): ...

def make(): return Mine("x")
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_agents").mkdir()
    for name, text in (
        ("own_agents/good.py", MODULE),
        ("own_agents/broken.py", "import no_such_package\n"),
        ("own_agents/wrong.py", "def f(:\n"),
        ("own_agents/quits.py", "raise SystemExit('bye')\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def run_with(**keys: Any) -> RunArguments:
    return RunArguments(tasks="t.jsonl", **keys)


def test_a_run_file_names_a_class() -> None:
    options = {"greeting": "hi", "times": 2}
    for given in (options, json.dumps(options)):
        harness = build_harness(run_with(agent="own_agents.good:Mine", agent_options=given))
        assert (harness.name, harness.folders) == ("mine", ())
        require_launch(harness, [Task(id="t", instruction="x")])
    assert load_harness("own_agents.good:Bare").name == "bare"
    with pytest.raises(ConfigError, match="agent_command is read only with agent: shell"):
        build_harness(run_with(agent="own_agents.good:Mine", agent_command="true"))


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        ("no_such_module:Mine", {}, "there is no module 'no_such_module', neither in the current folder"),
        ("own_agents.nope:Mine", {}, "there is no module 'own_agents.nope'"),
        (
            "own_agents.broken:Mine",
            {},
            r"ModuleNotFoundError: No module named 'no_such_package' \(.*broken.py:1 in",
        ),
        ("own_agents.wrong:Mine", {}, "cannot be imported: SyntaxError"),
        ("own_agents.quits:Mine", {}, "cannot be imported: SystemExit: bye"),
        ("own_agents.good:Mina", {}, "has no 'Mina'; did you mean 'Mine'?"),
        ("own_agents.good:make", {}, "make is a function, and must be a class"),
        ("json:JSONDecoder", {}, "is no harness: it lacks install, build_launch, judge_exit, classify; derive"),
        ("own_agents.good:Half", {}, "is no harness: it lacks install, judge_exit, classify; derive"),
        ("own_agents.good:Empty", {}, "is no harness: it lacks build_launch"),
        ("polar_trl.harness.base:Harness", {}, "is no harness: it lacks build_launch"),
        ("own_agents.good:Nameless", {}, "its name must be a text that is not empty"),
        (
            "own_agents.good:Mine",
            {},
            "agent_options do not fit its arguments: missing a required argument: 'greeting'",
        ),
        ("own_agents.good:Mine", {"greeting": "x", "color": 1}, "unexpected keyword argument 'color'"),
        ("own_agents.good:Mine", {"greeting": "x", "times": 10}, "cannot be built: ValueError: too often"),
        ("own_agents.good:Quits", {}, "cannot be built: SystemExit: 3"),
        ("own_agents.good:Placed", {}, r"its folders must be a list of pathlib.Path, not \['/opt/agent'\]"),
        ("own-agents.good:Mine", {}, "is not known; known are shell, claude_code, .* as package.module:Class"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence(agent: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build_harness(run_with(agent=agent, agent_options=options))
    assert "\n" not in str(raised.value) and agent in str(raised.value)


def test_what_build_launch_gives_must_be_a_launch() -> None:
    with pytest.raises(ConfigError, match="agent late: build_launch gives a str, and not a Launch"):
        require_launch(load_harness("own_agents.good:Late"), [Task(id="t", instruction="x")])
    with pytest.raises(ConfigError, match=r"agent numbers: env\['MAX_TURNS'\] of its Launch must be text, not 20"):
        require_launch(load_harness("own_agents.good:Numbers"))


def test_an_instruction_that_is_no_text_is_found_for_any_agent() -> None:
    with pytest.raises(ConfigError, match="task b: the instruction holds half a surrogate pair at position 0"):
        require_launch(
            load_harness("own_agents.good:Bare"), [Task(id="a", instruction=""), Task(id="b", instruction="\udc80")]
        )


def test_a_base_class_has_what_most_agents_need() -> None:
    class Least(Harness):
        name = "least"

        def build_launch(self, task: Any, endpoint: Any) -> Launch:
            return Launch(command="true")

    least = Least()
    least.install()
    assert (least.folders, least.classify(None)) == ((), "policy")  # type: ignore[arg-type]


def test_a_command_and_a_name_are_no_class() -> None:
    names = [
        "codex",
        "shell",
        "my-agent {instruction}",
        "a:b c",
        "http://x:1",
        "a/b:C",
        "pi@1.5.2",
        "a:",
        ":b",
        "a:b:c",
    ]
    assert not any(map(is_object_name, names))
    assert is_object_name("my_agents:Mine") and is_object_name("a.b.c:D")


def test_options_of_a_command() -> None:
    keys = {"agent_command": "agent", "agent_options": {"auxiliary_without_tools": True}}
    assert build_harness(run_with(**keys)).classify(type("R", (), {"tools": ()})()) == "auxiliary"
    with pytest.raises(ConfigError, match="agent_options has tools; those of agent_command are: auxiliary"):
        build_harness(run_with(agent_command="agent", agent_options={"tools": ["bash"]}))


def test_doctor_tries_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "own_agents.good:Bare", "--json"]) == 1
    (trial,) = json.loads(capsys.readouterr().out)["agents"].values()
    assert not trial["works"] and "got no answer from the model (exit code 0" in trial["why"]
    assert main(["doctor", "own_agents.good:Nope"]) == 2
    assert "has no 'Nope'" in capsys.readouterr().err


def test_folders_are_shown_where_they_are_named_and_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    harness = build_harness(run_with(agent_command="true", agent_folders=[str(tmp_path / "link")]))
    assert list(harness.folders) == [tmp_path / "link", tmp_path / "real"]
