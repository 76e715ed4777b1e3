"""README.md and docs/*.md -> their commands, blocks, links and headings. It refuses blocks that are not closed."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = ("polar-trl", "accelerate", "python", "python3", "bash", "pip", "vllm", "docker", "git", "export", "ssh")
"""What a line outside of a bash block must not begin with: it would be a command that nothing runs."""


@dataclass(frozen=True)
class Block:
    """A fenced block, or an indented one (language "")."""

    page: Path
    language: str
    text: str
    is_fenced: bool = True

    @property
    def name(self) -> str:
        return str(self.page.relative_to(ROOT))


def find_blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in order."""
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").split("\n")
    number = 0
    while number < len(lines):
        if fence := re.match(r"( *)```(\w*)$", lines[number]):
            end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == "```"), None)
            assert end is not None, f"{page.name}:{number + 1}: the block is not closed"
            cut = len(fence[1])
            text = "\n".join(line[cut:] for line in lines[number + 1 : end])
            blocks.append(Block(page, fence[2], text))
            number = end + 1
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            start = number
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[start:number]).strip("\n")
            blocks.append(Block(page, "", text, is_fenced=False))
        else:
            number += 1
    return blocks


def find_commands(block: Block) -> list[str]:
    """The commands of a bash block: continued lines joined, comments gone, one space between words."""
    commands = []
    for line in block.text.replace("\\\n", " ").split("\n"):
        command = re.sub(r"\s+", " ", strip_comment(line)).strip()
        if command:
            commands.append(command)
    return commands


def strip_comment(line: str) -> str:
    """What bash reads of a line: all before a # that begins a word outside of quotes."""
    quote = ""
    for position, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (position == 0 or line[position - 1].isspace()):
            return line[:position]
    return line


def list_commands() -> dict[str, str]:
    """Every command of every bash block -> the page that shows it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in find_blocks(page):
            if block.language == "bash":
                for command in find_commands(block):
                    found.setdefault(command, block.name)
    return found


def find_links(page: Path) -> list[str]:
    """Targets of links and pictures, outside of code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    return re.findall(r"\]\(([^()\s]+)\)", text)


def find_anchors(page: Path) -> set[str]:
    """What `#...` of a link may name: the headings, as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {slugify(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def slugify(heading: str) -> str:
    """Lower case, spaces to hyphens, no signs but these."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
