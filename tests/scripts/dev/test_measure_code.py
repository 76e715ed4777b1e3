"""The measures of the code: what is counted, and what breaks a limit."""

from pathlib import Path

import measure_code
import pytest

MODULES = {
    "__main__.py": "",
    "__init__.py": "",
    "a.py": "from typing import TYPE_CHECKING\nfrom polar_trl import b\nif TYPE_CHECKING:\n    import polar_trl.c\n",
    "b.py": "try:\n    from polar_trl.a import x\nexcept ImportError:\n    pass\n",
    "c.py": "import polar_trl.a\n\n\ndef later():\n    import polar_trl.c\n",
    "grpo/big.py": "class Big:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21)),
    "grpo/long.py": "def long():\n" + "    x = 1\n" * 59 + "def longer():\n" + "    x = 1\n" * 60,
    "grpo/words.py": '"""A text -> ids. It refuses none."""\n\n\ndef f():\n    """What it does."""\n',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        path = tmp_path / "polar_trl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_is_counted(tree: Path) -> None:
    measures = measure_code.measure(tree)
    assert measures["import cycles"].found == ["polar_trl.a <-> polar_trl.b"]
    assert measures["functions over 60 lines"].found == ["polar_trl/grpo/long.py:61 longer"]
    assert measures["classes over 20 methods"].found == ["polar_trl/grpo/big.py:1 Big"]
    assert measures["modules directly in polar_trl/"].text == "3"
    assert measures['module docstrings that say "refuses"'].text == "1"
    assert measures['module docstrings with "->" in the first line'].text == "1"
    assert measures["function docstrings that open with What, Whether, How or Where"].text == "1"
    assert measures["public names with a docstring"].is_broken


def test_a_broken_limit_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure_code.py", "--tree", str(tree), "--check"])
    with pytest.raises(SystemExit) as stopped:
        measure_code.main()
    assert stopped.value.code == 1
    assert "functions over 60 lines: 1, at most 0\n    polar_trl/grpo/long.py:61 longer\n" in capsys.readouterr().out
