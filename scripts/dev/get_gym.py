#!/usr/bin/env python3
"""Install NeMo Gym, in the version of the extra `gym`, into an environment of its own (1 GB), and print its folder.

It has requirements of its own, and needs Python 3.12: that of the path or of pyenv, or else uv downloads one. Costs
nothing where it is there.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "gym"


def read_requirement() -> str:
    """Read what the extra asks for, such as "nemo-gym>=0.4,<0.5"."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = extras["gym"]
    return str(requirement).partition(";")[0].strip()


def main() -> None:
    wanted, done = read_requirement(), FOLDER / "installed"
    if not done.exists() or done.read_text() != wanted:
        tools = FOLDER.parent / "uv"
        run([sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(tools), "uv"])
        uv = str(tools / "bin" / "uv")
        # pyenv's versions need not be on the path; where no 3.12 is found, uv downloads one
        of_pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/3.12*/bin/python3.12")
        run([uv, "venv", "-q", "--clear", "--python", str(max(of_pyenv, default="3.12")), str(FOLDER)])
        # Gym itself installs its servers by uv
        run([uv, "pip", "install", "-q", "--python", str(FOLDER), wanted, "uv"])
        done.write_text(wanted)
    print(FOLDER)


def run(command: list[str]) -> None:
    """Run a command, or end with one sentence."""
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"get_gym: {error}; NeMo Gym needs Python 3.12: install it, or let uv download it")


if __name__ == "__main__":
    main()
