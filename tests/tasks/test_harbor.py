"""Harbor folders: keys that are read, refused, or only listed."""

import json
from pathlib import Path

import pytest

from polar_trl.errors import ConfigError, TaskError
from polar_trl.tasks.harbor import load_harbor
from polar_trl.tasks.jsonl import load_tasks, save_tasks

FULL = """\
schema_version = "1.4"
source = "somewhere"

[task]
name = "org/first"
keywords = ["a"]

[metadata]
difficulty = "easy"
made = 2026-03-01

[agent]
timeout_sec = 90.0
user = "worker"

[verifier]
timeout_sec = 45
env = { LEVEL = "${HARBOR_TEST_LEVEL:-3}" }

[environment]
build_timeout_sec = 300
docker_image = "registry.example/first:1"
workdir = "/app"
cpus = 2
memory = "2G"
storage_mb = 512
network_mode = "public"
env = { WHO = "${HARBOR_TEST_WHO}" }
colour = "red"
"""


SILENT = ""
NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\n'


def make(folder: Path, toml: str = NO_NETWORK, **files: str) -> Path:
    """Make a task folder with a Dockerfile and a test script, unless told otherwise."""
    texts = {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM x\n",
        "tests/test.sh": "",
    }
    for path, text in (texts | files).items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder


def test_everything_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TEST_WHO", "me")
    folder = make(tmp_path / "first", FULL)
    (task,) = load_harbor(folder)
    assert (task.id, task.instruction, task.image) == ("first", "Do it.\n", "registry.example/first:1")
    assert (task.prepare_timeout_s, task.agent_timeout_s, task.grade_timeout_s) == (300.0, 90.0, 45.0)
    assert task.env == {"WHO": "me"}
    assert (task.workspace, task.tests) == (None, None)
    assert (task.build_context, task.workdir) == (str(folder / "environment"), "/app")
    # its own verifier decides, which writes outside of the work folder
    assert (task.network, task.writable_root) == ("public", True)
    assert task.metadata["harbor"] == {
        "folder": str(folder),
        "name": "org/first",
        "cpus": 2,
        "memory_mb": 2048,
        "storage_mb": 512,
        "verifier_env": {"LEVEL": "3"},
        "metadata": {"difficulty": "easy", "made": "2026-03-01"},
        "unread": ["agent.user", "environment.colour", "task.keywords"],
    }


def test_a_config_with_the_network_alone_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    (task,) = load_harbor(make(tmp_path / "t"))
    assert (task.prepare_timeout_s, task.agent_timeout_s, task.grade_timeout_s) == (600.0, 600.0, 600.0)
    assert (task.network, task.workdir) == ("none", None)


@pytest.mark.parametrize(
    ("toml", "network"),
    [
        ('version = "1.0"\n[environment]\nallow_internet = false', "none"),
        ('version = "1.0"\n[environment]\nallow_internet = true', "public"),
        ('[environment]\nallow_internet = true\nnetwork_mode = "no-network"', "none"),
        ('[agent]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "no-network"', "none"),
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "public"', "public"),
    ],
)
def test_the_network_is_what_the_task_says(tmp_path: Path, toml: str, network: str) -> None:
    (task,) = load_harbor(make(tmp_path / "t", toml))
    assert task.network == network


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (SILENT, "task 't': environment.network_mode: is missing, and Harbor's default is the public network"),
        ('[agent]\nnetwork_mode = "no-network"', "environment.network_mode: is missing"),  # the verifier's is not said
        ("[environment]\nallow_internet = 1", "environment.allow_internet: must be true or false, not 1"),
        (
            '[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"',
            "verifier.network_mode: must be the agent's, 'no-network': they share a container",
        ),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode: a network of some hosts only"),
    ],
)
def test_a_network_that_is_not_said_or_cannot_be_had(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_harbor(make(tmp_path / "t", toml))


def test_a_folder_of_folders(tmp_path: Path) -> None:
    for name in ("b", "a", ".being-written"):
        make(tmp_path / name)
    assert [task.id for task in load_harbor(tmp_path)] == ["a", "b"]
    assert [task.id for task in load_harbor(tmp_path, limit=1)] == ["a"]
    with pytest.raises(TaskError, match=r"no task\.toml in"):
        load_harbor(tmp_path / "a" / "tests")
    with pytest.raises(ConfigError, match="limit is 0"):
        load_harbor(tmp_path, limit=0)


SPEC = {"fail_to_pass": ["test_a.py::test_x[1]"], "pass_to_pass": [], "paths": ["test_a.py"], "files": ["test_a.py"]}


def test_the_tests_that_decide(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "t",
        **{"tests/spec.json": json.dumps(SPEC), "tests/hidden/test_a.py": "", "solution/gold.patch": "x"},
        **{"environment/workspace/a.py": "", "environment/requirements.txt": "pytest\n"},
    )
    (task,) = load_harbor(folder)
    assert not task.writable_root
    assert task.workspace == str(folder / "environment" / "workspace")
    assert task.tests is not None
    assert (task.tests.fail_to_pass, task.tests.files) == (("test_a.py::test_x[1]",), ("test_a.py",))
    assert task.tests.folder == str(folder / "tests" / "hidden")
    assert task.tests.gold_patch == str(folder / "solution" / "gold.patch")
    assert task.tests.requirements == str(folder / "environment" / "requirements.txt")
    assert task.tests.python == "python"
    # and they survive the form that tasks are stored in
    save_tasks(tmp_path / "t.jsonl", [task])
    assert load_tasks(tmp_path / "t.jsonl") == [task]


def test_another_files_name_is_no_spec(tmp_path: Path) -> None:
    (task,) = load_harbor(make(tmp_path / "t", **{"tests/spec.json": '{"cases": []}'}))
    assert task.tests is None


@pytest.mark.parametrize(
    ("toml", "files", "message"),
    [
        ("x = [", {}, "task 't': task.toml or instruction.md cannot be read"),
        ("", {"instruction.md": None}, "task 't': instruction.md is missing"),
        ("", {"instruction.md": " \n"}, "task 't': instruction.md is empty"),
        ("", {"tests/test.sh": None}, "task 't': tests/test.sh is missing"),
        ("", {"environment/Dockerfile": None}, "task 't': environment: there is no docker_image"),
        ("", {"environment/docker-compose.yaml": ""}, "task 't': environment/docker-compose.yaml: tasks of several"),
        ("agent = 3", {}, "task 't': agent: must be a table"),
        ('[[steps]]\nname = "one"', {}, "task 't': steps: tasks of several steps"),
        ('[environment]\nos = "windows"', {}, "task 't': environment.os: 'windows' is not supported"),
        ("[environment]\ngpus = 1", {}, "task 't': environment.gpus: GPUs"),
        ('[[environment.mcp_servers]]\nname = "a"', {}, "task 't': environment.mcp_servers: MCP servers"),
        ('[verifier]\nenvironment_mode = "separate"', {}, "task 't': verifier.environment: a verifier in a container"),
        ("[agent]\ntimeout_sec = -1", {}, "task 't': agent.timeout_sec: must be a number above 0, not -1"),
        ("[agent]\ntimeout_sec = inf", {}, "task 't': agent.timeout_sec: must be a number above 0, not inf"),
        ('[verifier]\ntimeout_sec = "3"', {}, "task 't': verifier.timeout_sec: must be a number above 0, not '3'"),
        ("[environment]\ndocker_image = 3", {}, "task 't': environment.docker_image: must be text, not 3"),
        ('[environment]\nmemory = "much"', {}, "task 't': environment.memory: must be a size"),
        ('[environment]\nnetwork_mode = "some"', {}, "task 't': environment.network_mode: must be one of no-network"),
        ('[environment]\nnetwork_mode = "allowlist"', {}, "environment.network_mode: a network of some hosts only"),
        ('[environment]\nallowed_hosts = ["a"]', {}, "environment.network_mode: a network of some hosts only"),
        ("[environment]\nenv = { A = 1 }", {}, "task 't': environment.env: must be a table of texts"),
        ('[environment.env]\nA = "${NOT_SET_ANYWHERE}"', {}, "environment.env: the variable NOT_SET_ANYWHERE is not"),
        ("", {"tests/spec.json": "{"}, "task 't': tests/spec.json cannot be read"),
        ("", {"tests/spec.json": '{"fail_to_pass": []}'}, "task 't': 'tests.fail_to_pass' is missing or empty"),
        ("", {"tests/spec.json": '{"fail_to_pass": "a"}'}, "task 't': 'tests.fail_to_pass' must be a list of texts"),
        ("", {"tests/spec.json": json.dumps(SPEC)}, "task 't': 'tests.folder': there is no folder "),
        (
            "",
            {"tests/spec.json": json.dumps(SPEC), "tests/hidden/b.py": ""},
            "task 't': 'tests.files': 'test_a.py' is not in ",
        ),
        ('[environment]\nworkdir = "/usr"', {}, "task 't': 'workdir': the work folder cannot be '/usr'"),
        ('[environment.env]\n"A=B" = "x"', {}, "task 't': 'env': no process can be given the variable 'A=B'"),
        ("[metadata]\npackage = 3", {}, "task 't': metadata.harbor: 'metadata.package' must be text, not 3"),
    ],
)
def test_refused(tmp_path: Path, toml: str, files: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_harbor(make(tmp_path / "t", toml, **files))
    assert message in str(caught.value)
