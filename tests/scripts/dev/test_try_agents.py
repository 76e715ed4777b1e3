"""Test examples/agents: those that install quickly are installed, as their first lines say, and run a session.

`python scripts/dev/try_agents.py` does the same with all of them.
"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "dev"))

from try_agents import SCRIPTS, install, try_agent  # noqa: E402


@pytest.mark.parametrize("name", ["aider", "continue", "copilot", "kimi_code"])
def test_an_agent_of_the_examples_works(name: str) -> None:
    report = try_agent(name, install(name))
    assert (report["works"], report["why"]) == (True, "")
    assert report["dialects"] == {"openai_chat": 2} and report["auxiliary"] == 0
    assert report["forks"] == (1 if name == "aider" else 0)


def test_the_page_has_each_of_them_at_its_version() -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    for path in SCRIPTS.glob("*.sh"):
        head = path.read_text().partition("\n\n")[0]
        version = re.search(r"\d+\.\d+\.\d+", head)
        assert version is not None and re.search(rf"\| [\w ]+ {re.escape(version[0])} \| `{path.name}` \|", page), path
        assert re.search(rf"[@=]{re.escape(version[0])}\b", head), f"{path}: another version is installed"
