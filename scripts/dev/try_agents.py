#!/usr/bin/env python3
"""Install the agents of examples/agents at the versions that their first lines name, and try each with the doctor.

python scripts/dev/try_agents.py               all of them, about 2 GB, into .cache/agents
python scripts/dev/try_agents.py aider cline   these two
python scripts/dev/try_agents.py --json FILE   what was found, as polar-trl doctor --json prints it

Exits with 1 if one does not work.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.install import UV

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "agents"
INSTALLED = ROOT / ".cache"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in SCRIPTS.glob("*.sh"))
    parser.add_argument("agents", metavar="AGENT", nargs="*", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := set(args.agents) - set(names):
        parser.error(f"not known: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    reports = {}
    for name in args.agents or names:
        started = time.monotonic()
        folder = install(name)
        seconds = time.monotonic() - started
        reports[name] = try_agent(name, folder)
        works = "works" if reports[name]["works"] else f"does not work: {reports[name]['why']}"
        print(f"{name}: installed in {seconds:.0f} s, {works}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1))
    return 0 if all(report["works"] for report in reports.values()) else 1


def install(name: str) -> Path:
    """Run the command of its first lines, unless that was done; the folder that it filled."""
    text = (SCRIPTS / f"{name}.sh").read_text()
    found = re.search(r"^#   (npm install --prefix (\S+) .*|uv venv --python \S+ (\S+) && .*)$", text, re.MULTILINE)
    assert found is not None, f"{name}.sh says in no comment how it is installed"
    folder = INSTALLED / (found[2] or found[3])
    mark = folder / ".installed"
    if not mark.exists() or mark.read_text() != found[1]:
        UV.install()
        env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        pythons = [str(path) for path in Path.home().glob(".pyenv/versions/*/bin")]
        env["PATH"] = ":".join([str(UV.program.parent), env["PATH"], *pythons])
        command = found[1].replace("uv venv", "uv venv --clear --no-project")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["bash", "-c", command], cwd=INSTALLED, env=env, check=True, stdin=subprocess.DEVNULL)
        mark.write_text(found[1])
    return folder


def try_agent(name: str, folder: Path) -> dict[str, object]:
    """Run `polar-trl doctor` with the command of its first lines; its report."""
    script = SCRIPTS / f"{name}.sh"
    found = re.search(r"^#   agent_command: (.*)$", script.read_text(), re.MULTILINE)
    assert found is not None, f"{name}.sh says in no comment how it is started"
    command = found[1].replace("FOLDER", shlex.quote(str(folder)))
    folders = [str(folder), *find_python(folder)]
    words = ["doctor", command, "--json", "--agent_files", str(script), "--agent_folders", *folders]
    done = subprocess.run([sys.executable, "-m", "polar_trl", *words], capture_output=True, text=True, cwd=ROOT)
    if not done.stdout:
        raise ConfigError(f"{name}: polar-trl doctor says: {done.stderr.strip()}")
    (report,) = json.loads(done.stdout)["agents"].values()
    return dict(report)


def find_python(folder: Path) -> list[str]:
    """Find the folder of the Python that a virtual environment was made with, unless it is the system's own."""
    settings = folder / "pyvenv.cfg"
    if not settings.exists():
        return []
    home = re.search(r"^home = (.*)$", settings.read_text(), re.MULTILINE)
    assert home is not None, settings
    return [] if home[1].startswith("/usr/bin") else [str(Path(home[1]).parent)]


if __name__ == "__main__":
    sys.exit(main())
