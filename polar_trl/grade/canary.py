"""Two tests whose outcome is known, to ride along with those that decide: one must pass, the other must fail.

They are made of words of the deciding tests' own names, so that neither name nor look tells them from real ones. It
refuses to say more than this: code that works out which is which, and answers right, is not noticed.
"""

import re
import secrets
from collections.abc import Mapping, Sequence

WORDS = ("values", "empty", "nested", "order", "types", "keys", "names", "parse", "range", "simple", "copy", "items")


class Canary:
    """One file with both tests, in a folder of its own (pytest 9 drops a file that lies in a folder it was given too).

    Args:
        ids: Of the tests that decide.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        names = [name.partition("[")[0].rpartition("::")[2].removeprefix("test_") for name in ids]
        found = {word for name in names for word in re.findall(r"[a-z]{3,}", name.lower())} - {"test", "tests"}
        words = sorted(found | set(WORDS))
        made = {"_".join(secrets.SystemRandom().sample(words, 3)) for _ in range(64)} - {*names}
        folder, module, passing, failing = secrets.SystemRandom().sample(sorted(made), 4)
        self.path = f"{folder}/test_{module}.py"
        self._passing, self._failing = f"{self.path}::test_{passing}", f"{self.path}::test_{failing}"
        left, right = (1000 + secrets.randbelow(9000) for _ in range(2))
        tests = [(passing, left + right), (failing, left + right + 1)]
        secrets.SystemRandom().shuffle(tests)
        self.text = "\n\n".join(f"def test_{name}():\n    assert {left} + {right} == {sum_}\n" for name, sum_ in tests)

    def find_fault(self, outcomes: Mapping[str, str], *, passed: str, failed: str) -> str | None:
        """The counter of what is wrong with the two, None where nothing is."""
        seen = outcomes.get(self._passing), outcomes.get(self._failing)
        if seen == (passed, failed):
            return None
        return "test_runs_died" if seen == (None, None) else "canaries_broken"
