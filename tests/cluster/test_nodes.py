"""What a node that is not set up as the trainer is says, without a cluster."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from small_package import make_task

from polar_trl.cluster.backend import RemoteBackend
from polar_trl.cluster.gateway import Gateway
from polar_trl.cluster.nodes import Node, Place
from polar_trl.errors import ConfigError, PolarError, SandboxError, WorkerLostError
from polar_trl.setup.agents import build_harness
from polar_trl.setup.cluster_parts import NodeRecipe
from polar_trl.setup.run_setup import MachineRecipe, RunArguments
from polar_trl.tasks.build.suite import find_environment
from polar_trl.tools import cluster_doctor
from polar_trl.types import Task


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


def test_a_trainer_without_a_token_is_told_in_one_sentence(tmp_path: Path) -> None:
    """In a process of its own: Ray reads it once."""
    code = "from polar_trl.cluster.nodes import Cluster; Cluster('auto', needs={}, kind='bwrap')"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOME": str(tmp_path)}
    env |= {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "token"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert re.search(r"ConfigError: sandbox_cluster: no cluster answers at 'auto' \(.*token", done.stderr), done.stderr


def test_no_node_hides_another_one_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(RemoteBackend):
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def set_up_all(self, tasks: Sequence[Task]) -> dict[str, PolarError | None]:
            return {"0123456789": SandboxError("no disk"), "abcdefghij": None}

        def name_node(self, node_id: str) -> str:
            return "host"

        def close(self) -> None:
            pass

    monkeypatch.setattr(cluster_doctor, "RemoteBackend", Two)
    found = cluster_doctor.check_cluster("auto", {}, kind="bwrap", image=None, install=False, delay_s=0.0)
    assert {name: node.problem for name, node in found.items()} == {"host": "no disk", "host (abcdefgh)": ""}


def test_a_session_that_was_stopped_waits_for_no_further_place(tmp_path: Path) -> None:
    """It is stopped while its node is lost, before it asks for another place."""
    backend = object.__new__(RemoteBackend)
    backend._num_given_up = 0
    places = []

    class Full:
        gateway = Gateway("127.0.0.1", None)

        def take_place(self, node_id: str | None, is_given_up: Callable[[], bool]) -> Place:
            places.append(is_given_up())
            if is_given_up():
                raise SandboxError("stopped")
            return Place(None, "n")

    def find(node_id: str) -> Node:
        backend.give_up()
        raise WorkerLostError("n", "it left")

    backend._cluster, backend._find, backend._release = Full(), find, lambda place, route: None  # type: ignore
    with pytest.raises(SandboxError, match="stopped"):
        backend.create(Task(id="t", instruction=""), "s")
    assert places == [False, True]
    Full.gateway.stop()


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
