"""A cache of the test's own, and this Python in place of an environment of pinned packages."""

from pathlib import Path

import pytest
from calc_releases import PYTHON

from polar_trl.cache import CACHE_VARIABLE
from polar_trl.tasks.build.folders import Tools


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("pytest\n")
    return Tools(python=PYTHON, requirements=requirements)
