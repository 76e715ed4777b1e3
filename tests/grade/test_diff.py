"""The diff of a session's work folder: right for people, and bounded whatever an agent left."""

import os
import random
from pathlib import Path

import pytest

from polar_trl.grade import diff
from polar_trl.grade.diff import MAX_CHARACTERS, render_changes
from polar_trl.sandbox.disk import make_folders


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """An original tree, and the copy of it that a local sandbox gives to an agent."""
    before = tmp_path / "before"
    (before / "pkg").mkdir(parents=True)
    (before / "pkg/m.py").write_text("".join(f"line {i}\n" for i in range(50)))
    (before / "gone.txt").write_text("x\n")
    (before / "tool.sh").write_text("echo\n")
    make_folders(tmp_path / "session", before)
    return before, tmp_path / "session/work"


def test_nothing_changed(trees: tuple[Path, Path]) -> None:
    assert render_changes(*trees) == ""


def test_a_change_is_a_unified_diff(trees: tuple[Path, Path]) -> None:
    before, after = trees
    text = (after / "pkg/m.py").read_text().replace("line 7\n", "line seven\n").replace("line 40\n", "")
    (after / "pkg/m.py").write_text(text.removesuffix("\n"))
    (after / "gone.txt").unlink()
    (after / "new.txt").write_text("one\ntwo\n")
    said = render_changes(before, after)
    assert "--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -5,7 +5,7 @@\n line 4\n line 5\n line 6\n-line 7\n+line seven\n" in said
    assert "@@ -38,7 +38,6 @@\n line 37\n line 38\n line 39\n-line 40\n line 41\n" in said
    assert said.count("@@ -") == 5 and "+line 49\n\\ No newline at end of file\n" in said
    assert "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n" in said
    assert said.endswith("--- a/gone.txt\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n")


def test_git_applies_it(trees: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = trees
    numbers = random.Random(1)
    for _ in range(20):
        lines = (before / "pkg/m.py").read_text().split("\n")
        for _ in range(numbers.randrange(1, 8)):
            lines[numbers.randrange(len(lines)) :][: numbers.randrange(3)] = []
            lines.insert(numbers.randrange(len(lines)), f"new {numbers.random()}")
        (after / "pkg/m.py").write_text("\n".join(lines))
        (tmp_path / "patch").write_text(render_changes(before, after))
        target = tmp_path / f"applied{numbers.random()}"
        make_folders(target, before)
        code = os.system(f"cd {target}/work && git apply --unsafe-paths {tmp_path}/patch")
        assert code == 0
        assert (target / "work/pkg/m.py").read_text() == "\n".join(lines)


def test_what_the_task_laid_is_no_change(trees: tuple[Path, Path]) -> None:
    before, after = trees
    (after / "given.txt").write_text("hello\n")
    (after / "pkg/m.py").write_text("laid over\n")
    given = {"given.txt": "hello\n", "pkg/m.py": "laid over\n"}
    assert render_changes(before, after, given) == ""
    (after / "given.txt").write_text("hello\nmore\n")
    assert render_changes(before, after, given) == "--- a/given.txt\n+++ b/given.txt\n@@ -1,1 +1,2 @@\n hello\n+more\n"
    (after / "given.txt").unlink()
    assert "-hello" in render_changes(before, after, given)


def test_a_folder_that_was_empty_is_all_new(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    assert "+++ b/a\n@@ -0,0 +1,1 @@\n+1\n" in render_changes(None, tmp_path)


def test_what_is_no_text_is_named(trees: tuple[Path, Path]) -> None:
    before, after = trees
    (after / "image.png").write_bytes(b"\x89PNG\0")
    (after / "latin").write_bytes(b"\xe4")
    (after / "large").write_bytes(b"x" * ((1 << 20) + 1))
    (after / "link").symlink_to("/etc/passwd")
    (after / "tool.sh").chmod(0o755)
    os.mkfifo(after / "pipe")
    said = render_changes(before, after)
    assert "# not a file: pipe\n" in said
    assert "+++ b/image.png\n# nothing -> binary, 5 bytes\n" in said
    assert "+++ b/latin\n# nothing -> binary, 1 bytes\n" in said
    assert "+++ b/large\n# nothing -> large, 1048577 bytes\n" in said
    assert "+++ b/link\n# a link to /etc/passwd\n" in said and "root:" not in said
    assert "+++ b/tool.sh\n# now executable\n" in said


def test_names_of_the_agents_stay_on_their_line(trees: tuple[Path, Path]) -> None:
    before, after = trees
    (after / "a\n# not a file: b\x1b[2J\udcff").write_text("")
    assert r"+++ b/a\n# not a file: b\x1b[2J" in render_changes(before, after)


def test_it_is_cut_and_says_so(trees: tuple[Path, Path]) -> None:
    before, after = trees
    for number in range(30):
        (after / f"f{number:02}").write_text(f"{number}\n" * 4000)
    said = render_changes(before, after)
    assert len(said) < MAX_CHARACTERS + 100
    assert "# cut here: the rest of this file's changes is not shown\n" in said
    assert said.endswith("# cut here; 27 more files changed\n")


def test_a_matcher_that_would_take_minutes_is_not_asked(trees: tuple[Path, Path]) -> None:
    before, after = trees
    words = random.Random(1)
    (before / "pkg/m.py").write_text("".join(f"{words.randrange(100)}\n" for _ in range(20_000)))
    (after / "pkg/m.py").write_text("".join(f"{words.randrange(100)}\n" for _ in range(20_000)))
    assert "@@ -1,20000 +1,20000 @@" in render_changes(before, after)


def test_too_many_files_end_it(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = trees
    monkeypatch.setattr(diff, "MAX_NAMES", 10)
    for number in range(20):
        (after / f"f{number}").touch()
    assert render_changes(before, after).startswith("# too many files or too little time")


def test_out_of_time_the_rest_is_counted(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = trees
    monkeypatch.setattr(diff, "TIME_LIMIT_S", -1.0)
    (after / "f").touch()
    assert render_changes(before, after).startswith("# too many files or too little time")


def test_folders_without_end_and_a_missing_one_do_no_harm(trees: tuple[Path, Path], tmp_path: Path) -> None:
    before, after = trees
    here = os.getcwd()
    os.chdir(after)
    for _ in range(300):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    assert "# a folder that cannot be read: d/d" in render_changes(before, after)
    assert render_changes(before, tmp_path / "nowhere").startswith("# a folder that cannot be read: ")
