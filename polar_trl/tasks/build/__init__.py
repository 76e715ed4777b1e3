"""Build Harbor task folders from PyPI releases: real bug fixes and mutants."""
