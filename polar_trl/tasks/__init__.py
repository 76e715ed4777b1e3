"""Load and validate task sets: JSON lines, Harbor folders, SWE-bench rows, generated shell tasks."""
