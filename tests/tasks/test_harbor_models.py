"""Our reader of task.toml beside Harbor's own models: package harbor 0.25, installed apart.

It wants Python 3.12, and its models run on 3.11: they are imported without the packages above them, in a process of
their own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import TaskError
from polar_trl.tasks.harbor import READ, load_harbor

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".cache" / "harbor-0.25.0"
PACKAGES = ("harbor==0.25.0", "toml==0.10.2")
ASK = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
for name in ("harbor", "harbor.models", "harbor.models.task", "harbor.utils"):
    module = types.ModuleType(name)
    module.__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
    sys.modules[name] = module
from harbor.models.task.config import TaskConfig
TABLES = ("task", "agent", "verifier", "environment")
names = set(TaskConfig.model_fields) - set(TABLES)
for table in TABLES:
    kind = TaskConfig.model_fields[table].annotation
    kind = getattr(kind, "__args__", [kind])[0]
    names |= {f"{table}.{name}" for name in kind.model_fields}
said = []
for text in json.load(sys.stdin):
    try:
        said.append(TaskConfig.model_validate_toml(text).model_dump(mode="json"))
    except ValueError as error:
        said.append(str(error))
print(json.dumps({"names": sorted(names), "said": said}))
"""
UNREAD = {
    *("agent.user", "verifier.user", "verifier.collect", "environment.gpu_types", "environment.skills_dir"),
    *("environment.healthcheck", "solution", "multi_step_reward_strategy", "artifacts"),
    *("task.authors", "task.description", "task.keywords", "task.version"),
}
"""What Harbor reads and we do not: it is listed in a task's `metadata`, or is no use to an agent."""
OLD = {"version", "environment.memory", "environment.storage"}
"""What Harbor renames before its models see it."""
SAID = 'network_mode = "no-network"\n'
SAME = {
    "defaults": f"[environment]\n{SAID}",
    "public": '[environment]\nnetwork_mode = "public"',
    "old and off": "[environment]\nallow_internet = false",
    "old and on": "[environment]\nallow_internet = true",
    "old against new": f"[environment]\nallow_internet = true\n{SAID}",
    "times": f"[environment]\n{SAID}build_timeout_sec = 3\n[agent]\ntimeout_sec = 4.5\n[verifier]\ntimeout_sec = 5",
    "sizes": f"[environment]\n{SAID}cpus = 2\nmemory_mb = 300\nstorage_mb = 400",
    "old sizes": f'[environment]\n{SAID}memory = "1.5G"\nstorage = "512m"',
    "half a core": f"[environment]\n{SAID}cpus = 0.5",
    "places": f'[environment]\n{SAID}docker_image = "a/b:1"\nworkdir = "/app"\nos = "Linux"',
    "variables": f'[environment]\n{SAID}env = {{ A = "1" }}\n[verifier]\nenv = {{ B = "2" }}',
    "by phase": '[agent]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "no-network"',
    "schema": f'schema_version = "1.4"\n[environment]\n{SAID}',
    "old schema": f'version = "1.0"\n[environment]\n{SAID}',
}
WRONG = {
    "network": '[environment]\nnetwork_mode = "some"',
    "hosts without a list": f'[environment]\n{SAID}allowed_hosts = ["a.example"]',
    "hosts of a phase": f'[environment]\n{SAID}[agent]\nallowed_hosts = ["a.example"]',
    "size": f'[environment]\n{SAID}memory = "much"',
    "two sizes": f'[environment]\n{SAID}memory = "1G"\nmemory_mb = 5',
    "number": f'[environment]\n{SAID}[agent]\ntimeout_sec = "soon"',
    "system": f'[environment]\n{SAID}os = "plan9"',
    "table": f"agent = 3\n[environment]\n{SAID}",
    "variables": f"[environment]\n{SAID}env = {{ A = 1 }}",
    "mode": f'[environment]\n{SAID}[verifier]\nenvironment_mode = "elsewhere"',
}
UNSUPPORTED = {
    "silent": "",
    "hosts": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.example"]',
    "two networks": f'[environment]\n{SAID}[verifier]\nnetwork_mode = "public"',
    "steps": f'[environment]\n{SAID}[[steps]]\nname = "one"',
    "windows": f'[environment]\n{SAID}os = "windows"',
    "cards": f"[environment]\n{SAID}gpus = 1",
    "servers": f'[environment]\n{SAID}[[environment.mcp_servers]]\nname = "a"\nurl = "http://a.example"',
    "another container": f'[environment]\n{SAID}[verifier]\nenvironment_mode = "separate"',
}


@pytest.fixture(scope="module")
def harbor() -> dict[str, Any]:
    """What Harbor's models say of the files above, in order, and their fields."""
    if not INSTALLED.is_dir():
        INSTALLED.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=INSTALLED.parent) as scratch:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
            words = [*install, "--no-compile", "--target", f"{scratch}/made", *PACKAGES]
            subprocess.run(words, check=True, timeout=600)
            os.rename(f"{scratch}/made", INSTALLED)
    texts = json.dumps([*SAME.values(), *WRONG.values(), *UNSUPPORTED.values()])
    command = [sys.executable, "-I", "-B", "-c", ASK, str(INSTALLED)]
    done = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    names = [f"{group} {name}" for group, cases in CASES.items() for name in cases]
    return {"names": found["names"], "said": dict(zip(names, found["said"], strict=True))}


CASES = {"same": SAME, "wrong": WRONG, "unsupported": UNSUPPORTED}


def load(folder: Path, toml: str) -> dict[str, Any]:
    for path, text in (
        ("task.toml", toml),
        ("instruction.md", "x"),
        ("tests/test.sh", ""),
        ("environment/Dockerfile", ""),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (task,) = load_harbor(folder)
    ours = task.metadata["harbor"]
    return {
        "network": {"none": "no-network", "public": "public"}[task.network],
        "times": [task.prepare_timeout_s, task.agent_timeout_s, task.grade_timeout_s],
        "sizes": [ours["cpus"], ours["memory_mb"], ours["storage_mb"]],
        "places": [task.image, task.workdir],
        "variables": [task.env, ours["verifier_env"]],
    }


@pytest.mark.parametrize("name", SAME)
def test_what_both_read_is_the_same(harbor: dict[str, Any], tmp_path: Path, name: str) -> None:
    theirs = harbor["said"][f"same {name}"]
    assert isinstance(theirs, dict), theirs
    environment, agent, verifier = theirs["environment"], theirs["agent"], theirs["verifier"]
    assert load(tmp_path / "t", SAME[name]) == {
        "network": agent["network_mode"] or environment["network_mode"],
        # without a time limit of its own there, an agent gets one here
        "times": [environment["build_timeout_sec"], agent["timeout_sec"] or 600.0, verifier["timeout_sec"]],
        "sizes": [environment["cpus"], environment["memory_mb"], environment["storage_mb"]],
        "places": [environment["docker_image"], environment["workdir"]],
        "variables": [environment["env"], verifier["env"]],
    }


@pytest.mark.parametrize("name", WRONG)
def test_what_harbor_refuses_is_refused(harbor: dict[str, Any], tmp_path: Path, name: str) -> None:
    assert isinstance(harbor["said"][f"wrong {name}"], str), "Harbor takes it"
    with pytest.raises(TaskError, match="task 't': "):
        load(tmp_path / "t", WRONG[name])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_harbor_takes_and_cannot_be_had_here_is_refused(
    harbor: dict[str, Any], tmp_path: Path, name: str
) -> None:
    assert isinstance(harbor["said"][f"unsupported {name}"], dict), "Harbor refuses it too"
    with pytest.raises(TaskError, match="task 't': "):
        load(tmp_path / "t", UNSUPPORTED[name])


def test_a_silent_task_has_the_public_network_in_harbor(harbor: dict[str, Any]) -> None:
    assert harbor["said"]["unsupported silent"]["environment"]["network_mode"] == "public"


def test_every_key_of_harbors_is_read_or_known_not_to_be(harbor: dict[str, Any]) -> None:
    assert set(harbor["names"]) == (READ - OLD) | UNREAD
