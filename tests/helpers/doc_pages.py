"""Read the pages of the docs: their code blocks and commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def find_blocks(page: Path, language: str) -> list[str]:
    """Find the fenced blocks of a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def list_lines(block: str) -> list[str]:
    """List the commands of a bash block: lines joined, comments gone."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := " ".join(re.sub(r"(^|\s)#.*", "", line).split()))]
