"""Names as others spell them -> one spelling: packages of an index, and the paths in a patch.

It refuses to check whether what a name says exists.
"""

import re

_DIFF = re.compile(r'^diff --git (?:a/.+? b/(.+)|"a/.+?" "b/(.+)")$', re.MULTILINE)


def normalise_package(name: str) -> str:
    """A package's name as indexes compare it: "Foo_Bar" and "foo.bar" are "foo-bar"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_patched_paths(patch: str) -> list[str]:
    """The paths that a patch of git's changes, in its order; odd names stay quoted as git has them."""
    return [plain or quoted for plain, quoted in _DIFF.findall(patch)]
