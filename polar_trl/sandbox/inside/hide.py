"""Hide the tests that run from the code that they test: their files, and the names that hold their parameters.

Beside run_tests.py, which loads it; needs the standard library and pytest, nothing else.
"""

import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WANTS_FILES = re.compile(
    rb"__file__|inspect|traceback|linecache|importlib|runpy|fspath|(?<!os)(?<!sys)\.path\b|\.py\b|sys\.modules"
    rb"|multiprocessing|ProcessPool|joblib|subprocess|Popen|os\.system|executable"
)
TEST_NAME = "PYTEST_CURRENT_TEST"


class Hider:
    """A pytest plugin that removes the files of tests when all were collected, so that nothing reads them.

    Not those that may want themselves while they run, by a word in them, nor those that another one names.

    Args:
        texts: Of the Python files of tests, by absolute path.
    """

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts
        self._num_files_with = Counter(word for text in texts.values() for word in set(re.findall(rb"\w+", text)))

    def pytest_collection_finish(self, session: Any) -> None:
        for path in {str(item.path) for item in session.items} & self._texts.keys():
            if not self._is_needed(path):
                # for tracebacks; without a time of change no one asks for the file
                linecache.cache[path] = (0, None, linecache.getlines(path), path)
                Path(path).unlink(missing_ok=True)

    def _is_needed(self, path: str) -> bool:
        text, stem = self._texts[path], Path(path).stem.encode()
        is_in_itself = re.search(rb"\b" + re.escape(stem) + rb"\b", text) is not None
        return WANTS_FILES.search(text) is not None or self._num_files_with[stem] > is_in_itself


def name_no_tests(texts: Mapping[str, bytes]) -> None:
    """Have pytest say in the environment that a test runs, as some code wants, but not which: ids hold parameters.

    Args:
        texts: Of the files of tests; where one asks for the name, it is there.
    """
    runner: Any = sys.modules.get("_pytest.runner")

    def say(item: object, when: str | None) -> None:
        if when:
            os.environ[TEST_NAME] = f"test ({when})"
        else:
            os.environ.pop(TEST_NAME, None)

    if hasattr(runner, "_update_current_test_var") and not any(TEST_NAME.encode() in text for text in texts.values()):
        runner._update_current_test_var = say
