"""Render an agent's changes as a unified diff for people: bounded in time, memory and length, and never an error.

Nothing is decided by it, so it looks less closely than `changes.py` does: a file of the same size and time is taken to
be the same, files beyond 1 MiB are only named, and what does not fit is counted. Lines that begin with "#" are ours;
a file's own lines begin with " ", "+" or "-".
"""

import difflib
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from polar_trl.errors import FileTooLargeError, PolarError, TreeUnreadableError
from polar_trl.grade.changes import read_file, read_tree
from polar_trl.sandbox.base import Sandbox

MAX_CHARACTERS = 20_000
MAX_FILE_CHARACTERS = 8_000
"""Of one file's part: a generated file must not take the room of the others."""
MAX_FILE_BYTES = 1 << 20
MAX_NAMES = 20_000
"""Files and folders beyond those of the original tree."""
TIME_LIMIT_S = 5.0
MAX_PAIRS = 250_000
"""Lines removed times lines added. The matcher is quadratic; beyond this a part is shown as replaced altogether."""
CONTEXT = 3


def render_session_changes(sandbox: Sandbox, given: Mapping[str, str]) -> str:
    """Render what changed in a sandbox's work folder; `given` are the task's own files."""
    return render_changes(sandbox.base_tree, sandbox.host_workdir, given)


def render_changes(before: Path | None, after: Path, given: Mapping[str, str] = {}) -> str:
    """Render what changed between two trees: changed files first, then new ones, then those removed.

    Args:
        before: The original tree; None: an empty one.
        after: The agent's, hostile: FIFOs, links and folders without end do no harm.
        given: Text by path that was laid over the original before the agent came.

    Returns:
        At most 20,000 characters and a line that says what was left out; "" where nothing changed.
    """
    deadline = time.monotonic() + TIME_LIMIT_S
    notes: list[str] = []
    try:
        return _render(before, after, given, deadline, notes)
    except FileTooLargeError:
        return f"# too many files or too little time to list the changes of this work folder ({TIME_LIMIT_S:g} s)\n"
    except (PolarError, OSError, ValueError) as error:
        return f"# the changes could not be read: {type(error).__name__}: {_plain(str(error))[:300]}\n"


def _render(before: Path | None, after: Path, given: Mapping[str, str], deadline: float, notes: list[str]) -> str:
    old: Mapping[str, os.stat_result] = {}
    num_old = 0
    if before is not None:
        old, _, num_old = read_tree(before, lambda folder: None, math.inf, deadline)
    new, special, _ = read_tree(after, notes.append, num_old + MAX_NAMES, deadline)
    texts = {path: text.encode("utf-8", "replace") for path, text in given.items()}
    known = old.keys() | texts.keys()
    changed = [path for path in sorted(known & new.keys()) if not _is_alike(old.get(path), new[path], path in texts)]
    added = sorted(new.keys() - known)
    gone = sorted(known - new.keys())
    parts = [f"# not a file: {_plain(path)}\n" for path in sorted(special)[:20]]
    parts += [f"# a folder that cannot be read: {_plain(folder)}\n" for folder in notes[:20]]
    length, num_left = sum(map(len, parts)), 0
    for path in (*changed, *added, *gone):
        if length > MAX_CHARACTERS or time.monotonic() > deadline:
            num_left += 1
            continue
        first = _read_side(None if before is None else before / path, old.get(path), texts.get(path))
        part = _render_file(path, first, _read_side(after / path, new.get(path)))
        length += len(part)
        parts.append(part)
    whole = "".join(parts)
    if length <= MAX_CHARACTERS and not num_left:
        return whole
    end = whole.rfind("\n", 0, MAX_CHARACTERS) + 1
    return f"{whole[:end]}# cut here; {num_left} more files changed\n"


class _Side:
    """One file as it is on one side."""

    def __init__(self, kind: str, content: bytes = b"", size: int = 0, is_executable: bool = False) -> None:
        self.kind = kind
        """"none", "text", "binary", "large", "unreadable" or "link"."""
        self.content = content
        self.size = size
        self.is_executable = is_executable


def _is_alike(old: os.stat_result | None, new: os.stat_result, is_given: bool) -> bool:
    """Tell by size, mode and time whether a file is the same; a copy keeps the time, and so does an overlay."""
    if old is None or is_given:
        return False
    return (old.st_size, old.st_mtime_ns, old.st_mode) == (new.st_size, new.st_mtime_ns, new.st_mode)


def _read_side(path: Path | None, state: os.stat_result | None, given: bytes | None = None) -> _Side:
    if given is not None:
        return _Side(_find_kind(given), given, len(given))
    if path is None or state is None:
        return _Side("none")
    is_executable = stat.S_ISREG(state.st_mode) and bool(state.st_mode & stat.S_IXUSR)
    if stat.S_ISREG(state.st_mode) and state.st_size > MAX_FILE_BYTES:
        return _Side("large", size=state.st_size, is_executable=is_executable)
    try:
        content = read_file(path, state).content
    except TreeUnreadableError:
        return _Side("unreadable", size=state.st_size, is_executable=is_executable)
    kind = "link" if stat.S_ISLNK(state.st_mode) else _find_kind(content)
    return _Side(kind, content, len(content), is_executable)


def _find_kind(content: bytes) -> str:
    try:
        content.decode()
    except UnicodeDecodeError:
        return "binary"
    return "binary" if b"\0" in content else "text"


def _render_file(path: str, old: _Side, new: _Side) -> str:
    if (old.kind, old.content, old.is_executable) == (
        new.kind,
        new.content,
        new.is_executable,
    ) and old.kind != "large":
        return ""
    name = _plain(path)
    head = f"--- {f'a/{name}' if old.kind != 'none' else '/dev/null'}\n"
    head += f"+++ {f'b/{name}' if new.kind != 'none' else '/dev/null'}\n"
    if old.is_executable != new.is_executable and "none" not in (old.kind, new.kind):
        head += f"# {'now' if new.is_executable else 'no longer'} executable\n"
    if new.kind == "link":
        return head + f"# a link to {_plain(os.fsdecode(new.content))}\n"
    if {old.kind, new.kind} - {"text", "none"}:
        return head + f"# {_describe(old)} -> {_describe(new)}\n"
    lines: list[str] = []
    left = MAX_FILE_CHARACTERS - len(head)
    for line in _diff(_split(old.content), _split(new.content)):
        left -= len(line) + 1
        if left < 0:
            lines.append("# cut here: the rest of this file's changes is not shown")
            break
        lines.append(line)
    return head + "".join(f"{line}\n" for line in lines)


def _describe(side: _Side) -> str:
    return "nothing" if side.kind == "none" else f"{side.kind}, {side.size} bytes"


def _split(content: bytes) -> list[str]:
    text = content.decode()
    if not text:
        return []
    if text.endswith("\n"):
        return text[:-1].split("\n")
    return f"{text}\n\\ No newline at end of file".split("\n", text.count("\n"))


def _diff(old: list[str], new: list[str]) -> Iterator[str]:
    """Yield the hunks of a unified diff. What both begin and end with is cut off first: the matcher is quadratic."""
    shorter = min(len(old), len(new))
    start = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    end = next((i for i in range(shorter - start) if old[-1 - i] != new[-1 - i]), shorter - start)
    before, after = max(start - CONTEXT, 0), max(end - CONTEXT, 0)
    left, right = old[before : len(old) - after], new[before : len(new) - after]
    groups: Iterable[Sequence[tuple[str, int, int, int, int]]]
    if not left or not right or len(left) * len(right) > MAX_PAIRS:
        groups = [[("replace", 0, len(left), 0, len(right))]]
    else:
        groups = difflib.SequenceMatcher(None, left, right).get_grouped_opcodes(CONTEXT)
    for group in groups:
        i, i_end, j, j_end = group[0][1], group[-1][2], group[0][3], group[-1][4]
        yield f"@@ -{_span(before + i, i_end - i)} +{_span(before + j, j_end - j)} @@"
        for kind, a, b, c, d in group:
            if kind == "equal":
                yield from (f" {line}" for line in left[a:b])
                continue
            yield from (f"-{line}" for line in left[a:b])
            yield from (f"+{line}" for line in right[c:d])


def _span(start: int, length: int) -> str:
    return f"{start + 1 if length else start},{length}"


def _plain(path: str) -> str:
    """Write a name or a message in one line of printable characters."""
    text = path.encode("utf-8", "replace").decode()
    return text if text.isprintable() else ascii(text)[1:-1]
