"""Installing agents, with programs in the place of npm and uv: no network, the same files.

That the real ones install the real agents is what every test in tests/agents begins with.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polar_trl.cache import CACHE_VARIABLE
from polar_trl.errors import ConfigError
from polar_trl.harness.base import PackagedAgent
from polar_trl.harness.install import UV, NpmPackage, PyPIPackage

AGENT = NpmPackage(name="@org/agent", version="1.2.3", binary="agent")
TOOL = PyPIPackage(name="My.Tool", version="4.5", binary="my-tool")
# the last two arguments are the folder and name@version
NPM = """#!/bin/bash
echo "$@" >> {log}
folder="${{@: -2:1}}/node_modules/@org/agent"
mkdir -p "$folder" "${{@: -2:1}}/node_modules/.bin"
echo '{{"version": "{version}"}}' > "$folder/package.json"
echo '#!/bin/sh' > "${{@: -2:1}}/node_modules/.bin/agent"
{then}
"""
UV_PROGRAM = """#!/bin/bash
echo "$@" >> {log}
case "$1" in
venv) mkdir -p "${{@: -1}}/bin" && ln -s {python} "${{@: -1}}/bin/python" ;;
pip) folder="$(dirname "$(dirname "$7")")" && mkdir -p "$folder/lib/python3.99/site-packages/my_tool-4.5.dist-info" ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which the programs note their calls; the cache is empty."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    return tmp_path / "log"


def put_npm(log: Path, version: str = "1.2.3", then: str = "") -> None:
    program = log.parent / "bin" / "npm"
    program.write_text(NPM.format(log=shlex.quote(str(log)), version=version, then=then))
    program.chmod(0o755)


def put_uv(log: Path) -> None:
    """Put a uv, as its own installation leaves it."""
    for folder in ("bin", "lib/python3.99/site-packages/uv-" + UV.version + ".dist-info"):
        (UV.folder / folder).mkdir(parents=True)
    (UV.folder / "bin" / "python").symlink_to(sys.executable)
    UV.program.write_text(UV_PROGRAM.format(log=shlex.quote(str(log)), python=shlex.quote(sys.executable)))
    UV.program.chmod(0o755)
    (UV.folder / ".installed").touch()


def count_runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_an_installed_package_is_there_and_is_not_installed_again(log: Path) -> None:
    put_npm(log)
    assert AGENT.find_version() is None
    AGENT.install()
    AGENT.install()
    assert AGENT.find_version() == "1.2.3"
    assert AGENT.program.exists()
    assert log.read_text().split()[-3:] == ["--prefix", str(AGENT.folder), "@org/agent@1.2.3"]
    assert count_runs(log) == 1


def test_what_is_installed_is_read_only(log: Path) -> None:
    put_npm(log)
    AGENT.install()
    paths = [AGENT.folder, *AGENT.folder.rglob("*")]
    assert len(paths) > 5
    assert [path for path in paths if path.stat().st_mode & 0o222] == []


def test_another_version_than_asked_for_is_refused(log: Path) -> None:
    put_npm(log, version="0.9.0")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"@org/agent: asked for 1\.2\.3, the registry gave 0\.9\.0"):
            AGENT.install()
        assert AGENT.find_version() is None
    put_npm(log)
    AGENT.install()
    assert AGENT.find_version() == "1.2.3"


def test_an_interrupted_installation_is_none_and_is_done_again(log: Path) -> None:
    put_npm(log, then='touch "$folder/half"; kill -9 $$')
    with pytest.raises(ConfigError, match=r"@org/agent 1\.2\.3 could not be installed"):
        AGENT.install()
    half = AGENT.folder / "node_modules" / "@org" / "agent" / "half"
    assert half.exists() and AGENT.read_version() == "1.2.3"
    assert AGENT.find_version() is None
    put_npm(log)
    AGENT.install()
    assert not half.exists()
    assert AGENT.find_version() == "1.2.3"


def test_a_failure_says_what_the_program_said(log: Path) -> None:
    put_npm(log, then="echo no such version >&2; exit 1")
    with pytest.raises(ConfigError, match="no such version"):
        AGENT.install()


def test_two_processes_at_once_install_once(log: Path) -> None:
    # the first one waits in its installation until the second one has begun to wait for the lock
    put_npm(log, then=f"while [ ! -e {shlex.quote(str(log))}.go ]; do sleep 0.05; done")
    code = (
        "import sys; from polar_trl.harness.install import NpmPackage; print('begun', flush=True);"
        "NpmPackage(name='@org/agent', version='1.2.3', binary='agent').install(); print('done')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
    Path(f"{log}.go").touch()
    ends = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [stdout for stdout, _ in ends] == ["done\n"] * 2
    assert sum("installing @org/agent" in stderr for _, stderr in ends) == 1
    assert count_runs(log) == 1


def test_a_cache_that_cannot_be_written_is_one_sentence(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_npm(log)
    (log.parent / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(log.parent / "file"))  # root may write into any folder
    with pytest.raises(ConfigError) as caught:
        AGENT.install()
    assert str(caught.value) == (
        f"cannot install @org/agent under {log.parent}/file/agents (Not a directory); "
        "set POLAR_TRL_CACHE to a folder that can be written"
    )


def test_without_npm_it_says_what_to_install(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(log.parent / "bin"))
    with pytest.raises(ConfigError, match=r"@org/agent needs npm .* install Node\.js 20 or newer"):
        AGENT.install()


def test_a_python_package_gets_an_environment_of_its_own(log: Path) -> None:
    put_uv(log)
    TOOL.install()
    TOOL.install()
    assert TOOL.find_version() == "4.5"
    venv, pip = log.read_text().splitlines()
    assert venv.endswith(f"--python {sys.executable} {TOOL.folder}")
    assert pip.endswith(f"--compile-bytecode --python {TOOL.folder}/bin/python My.Tool==4.5")
    # its Python was removed from the machine
    TOOL.folder.joinpath("bin").chmod(0o755)
    (TOOL.folder / "bin" / "python").unlink()
    (TOOL.folder / "bin" / "python").symlink_to("/nowhere/python")
    assert TOOL.find_version() is None
    TOOL.install()
    assert TOOL.find_version() == "4.5"
    assert count_runs(log) == 4


def test_an_agent_is_there_when_all_that_it_needs_is(log: Path) -> None:
    put_npm(log)
    put_uv(log)
    agent = PackagedAgent(TOOL, AGENT)
    assert agent.folders == (TOOL.folder, AGENT.folder)
    AGENT.install()
    assert agent.find_installed_version() is None
    agent.install()
    assert agent.find_installed_version() == "1.2.3"
