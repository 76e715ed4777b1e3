"""What a node that is not set up as the trainer is says, without a cluster."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from small_package import make_task

from polar_trl.cluster.nodes import Node
from polar_trl.errors import ConfigError
from polar_trl.setup.cluster_parts import NodeRecipe
from polar_trl.setup.run_setup import MachineRecipe, RunArguments, build_harness
from polar_trl.tasks.build.suite import find_environment


class Failing:
    """An actor every method of which fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> "Failing":
        return self

    def future(self) -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.set_exception(self._error)
        return answer


def test_a_module_that_a_node_lacks_is_named() -> None:
    node = Node("n", Failing(ray.exceptions.RaySystemError(ModuleNotFoundError("No module named 'my_agents.one'"))))
    with pytest.raises(ConfigError, match=r"node n cannot import my_agents\.one: install it there"):
        node.ask("set_up")


def test_a_node_installs_the_packages_of_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "requirements.txt").write_text("# none\n")
    task = make_task(tmp_path / "task")
    assert task.tests is not None
    requirements = tmp_path / "requirements.txt"
    python = find_environment(requirements) / "bin/python"  # where the trainer's has put it
    tests = replace(task.tests, requirements=str(requirements), python=str(python))
    run = RunArguments(agent_command="true", sandbox="local", check_tasks=False)
    machine = MachineRecipe(run=run, harness=build_harness(run), run_id="r", check_jobs=1, is_first=False)
    NodeRecipe(machine=machine).build([replace(task, tests=tests)], [])[0].close()
    assert python.is_file()
    other = replace(tests, python=str(tmp_path / "cache/environments/python-0/bin/python"))
    with pytest.raises(ConfigError, match="the trainer has another build of Python than"):
        NodeRecipe(machine=machine).build([replace(task, tests=other)], [])
