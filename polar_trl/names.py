"""Normalize names of packages, and read paths out of patches. Nothing is looked up on disk."""

import re

_DIFF = re.compile(r'^diff --git (?:a/.+? b/(.+)|"a/.+?" "b/(.+)")$', re.MULTILINE)


def normalize_package(name: str) -> str:
    """Normalize a package's name as indexes compare it (PEP 503): "Foo_Bar" and "foo.bar" are "foo-bar"."""
    return re.sub(r"[-_.]+", "-", name).lower()


def list_patched_paths(patch: str) -> list[str]:
    """List the paths that a patch of git's changes, in its order; odd names stay quoted as git has them."""
    return [plain or quoted for plain, quoted in _DIFF.findall(patch)]
