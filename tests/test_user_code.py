"""The user's own code: found in the current folder, and named where it fails."""

import sys
from pathlib import Path

import pytest

from polar_trl.errors import ConfigError
from polar_trl.setup.run_setup import load_grader
from polar_trl.user_code import describe_error, format_trace, is_object_name, load_object, locate_error


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_of_the_current_folder_is_found_and_comes_last_afterwards(here: Path) -> None:
    (here / "near_grader.py").write_text("def score(task, sandbox):\n    import near_helper\n    return 1\n")
    (here / "near_helper.py").write_text("")
    (here / "colorsys.py").write_text("raise RuntimeError('a file of the user, in the place of a library')")
    assert load_object("grader", "near_grader:score")(None, None) == 1
    assert sys.path[-1] == str(here) and sys.path.count(str(here)) == 1
    sys.modules.pop("colorsys", None)
    import colorsys

    assert colorsys.__file__ != str(here / "colorsys.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such:f", r"grader 'no_such:f': there is no module 'no_such', neither in the current folder \(/"),
        ("near_pkg.no_such:f", r"there is no module 'near_pkg.no_such'"),
        ("near_one:scor", r"near_one \(.*near_one.py\) has no 'scor'; did you mean 'score'\?"),
        (
            "near_two:f",
            r"cannot be imported: ZeroDivisionError: division by zero \(near_two.py:2 in <module>, `1 / 0`\)",
        ),
        ("near_three:f", r"cannot be imported: SyntaxError"),
        (
            "near_four:f",
            r"cannot be imported: ModuleNotFoundError: No module named 'no_such_library' \(near_four.py:1",
        ),
        ("near_one:LIMIT", r"grader 'near_one:LIMIT' is a int, and must be a function"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(here: Path, text: str, message: str) -> None:
    (here / "near_pkg").mkdir()
    for name, source in (
        ("one", "LIMIT = 3\ndef score(task, sandbox): return 1\n"),
        ("two", "x = 1\n1 / 0\n"),
        ("three", "def f(:\n"),
        ("four", "import no_such_library\n"),
    ):
        (here / f"near_{name}.py").write_text(source)
        sys.modules.pop(f"near_{name}", None)
    with pytest.raises(ConfigError, match=message) as raised:
        load_grader(text)
    assert "\n" not in str(raised.value)


def test_names_of_objects() -> None:
    assert is_object_name("a:f") and is_object_name("a.b.c:F")
    assert not any(map(is_object_name, ("a", "a:", ":f", "test -e a:b", "a.py:f ", "a-b:f", "a.f")))


def test_an_error_inside_a_library_names_the_line_that_called_it() -> None:
    import json

    try:
        json.loads("{")
    except ValueError as error:
        assert "test_an_error_inside_a_library_names_the_line_that_called_it, `json.loads(" in locate_error(error)
        assert describe_error(error).startswith("JSONDecodeError: Expecting property name")
        assert format_trace(error).startswith(f'  File "{__file__}"')
        assert "json/decoder.py" in format_trace(error)


def test_an_error_of_no_users_code_names_no_line() -> None:
    error = ValueError("x")
    assert (locate_error(error), describe_error(error)) == ("", "ValueError: x")
    assert describe_error(ValueError()) == "ValueError"
