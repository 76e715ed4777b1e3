"""The kinds of sandbox: which one "auto" is, and what is said where one does not work or does not hold."""

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from polar_trl.cli import check_tasks, doctor
from polar_trl.errors import ConfigError, SandboxError
from polar_trl.sandbox import build_backend, choose_kind, describe_kinds, local
from polar_trl.sandbox.bwrap import backend as bwrap_backend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.disk import Overlay
from polar_trl.sandbox.docker import client
from polar_trl.sandbox.local import LocalSandboxBackend, describe_local
from polar_trl.setup.run_setup import RunArguments
from polar_trl.types import Task, TestSpec

PLAIN = Task(id="p", instruction="x")
TESTS = TestSpec(fail_to_pass=("a",), folder="/t", requirements="/t/requirements.txt")


@pytest.mark.parametrize(
    ("image", "task", "engine", "bare"),
    [
        (None, {}, "bwrap", "bwrap"),
        ("python:3.11", {}, "docker", "bwrap"),
        (None, {"image": "python:3.11"}, "docker", "bwrap"),
        ("python:3.11", {"writable_root": True}, "docker", "bwrap"),
        ("python:3.11", {"build_context": "/c"}, "docker", "bwrap"),
        (None, {"build_context": "/c", "workspace": "/w", "tests": TESTS}, "bwrap", "bwrap"),
        # what only an engine does is refused by it, where there is none
        (None, {"writable_root": True}, "docker", "docker"),
        (None, {"build_context": "/c"}, "docker", "docker"),
        (None, {"build_context": "/c", "workspace": "/w"}, "docker", "docker"),
        (None, {"image": "python:3.11", "network": "public"}, "docker", "docker"),
    ],
)
def test_auto_is_what_the_machine_can_do(
    image: str | None,
    task: dict[str, object],
    engine: str,
    bare: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = [PLAIN, Task(id="t", instruction="x", **task)]  # type: ignore[arg-type]
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(client, "SOCKETS", (f"{tmp_path}/docker.sock", f"{tmp_path}/{{uid}}.sock"))
    assert choose_kind("auto", image=image, tasks=tasks) == bare
    (tmp_path / f"{os.getuid()}.sock").touch()
    assert choose_kind("auto", image=image, tasks=tasks) == engine
    assert client.find_host() == f"unix://{tmp_path}/{os.getuid()}.sock"
    (tmp_path / "docker.sock").touch()
    assert client.find_host() == f"unix://{tmp_path}/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", "unix:///elsewhere")
    assert client.find_host() == "unix:///elsewhere"
    assert choose_kind("auto", image=image, tasks=tasks) == engine
    assert [choose_kind(name, image=image, tasks=tasks) for name in ("local", "bwrap")] == ["local", "bwrap"]


@pytest.mark.parametrize(("uid", "kind"), [(0, "docker"), (1000, "bwrap")])
def test_a_users_engine_does_not_write_to_an_images_root(uid: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///elsewhere")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    task = Task(id="t", instruction="x", image="python:3.11")
    assert choose_kind("auto", tasks=[task]) == "docker"
    assert choose_kind("auto", tasks=[task, replace(task, writable_root=True)]) == kind


def test_auto_is_the_default() -> None:
    assert RunArguments(tasks="t").sandbox == "auto"
    subparsers = argparse.ArgumentParser().add_subparsers()
    for command, arguments in ((doctor, []), (check_tasks, ["t"])):
        command.add_parser(subparsers)
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        assert subparsers.choices[name].parse_args(arguments).sandbox == "auto"
    assert isinstance(build_backend("auto"), BwrapSandboxBackend)


def test_an_image_is_for_sandboxes_that_have_them() -> None:
    with pytest.raises(ConfigError, match=r"is read by the docker and bwrap sandboxes, .* is 'local'"):
        build_backend("local", image="python:3.11")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="sandbox 'chroot' is not known; known are auto, bwrap, docker, local"):
        build_backend("chroot")


def test_each_way_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    said = describe_kinds()
    assert said["docker"].startswith(f"no: no container engine answers at unix://{tmp_path}/none.sock")
    assert said["bwrap"] == said["bwrap with images"] == "yes"
    assert said["local"].startswith("yes, but the local sandbox is no boundary")
    monkeypatch.setattr(
        bwrap_backend, "make_overlay", lambda *_: Overlay(layers=tmp_path, options="", merged=tmp_path)
    )
    assert describe_kinds()["bwrap with images"].startswith("no: a session's disk could not be made: mount: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = describe_kinds()
    assert said["bwrap"].startswith("no: the bubblewrap sandbox needs `bwrap`") and "bwrap with images" not in said


@pytest.mark.parametrize("encloses", [True, False])
def test_where_bubblewrap_is_missing_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encloses: bool
) -> None:
    monkeypatch.setattr(local, "can_enclose", lambda: encloses)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as raised:
        build_backend("auto")
    said = str(raised.value)
    assert "apt-get install bubblewrap" in said and "--sandbox local" in said and "\n" not in said
    assert ("change or remove its files" in said) == (not encloses)


@pytest.mark.parametrize("encloses", [True, False])
def test_local_says_what_it_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, encloses: bool
) -> None:
    monkeypatch.setattr(local, "can_enclose", lambda: encloses)
    with caplog.at_level(logging.WARNING):
        LocalSandboxBackend(tmp_path / "state")
    assert caplog.messages == [describe_local()]
    assert ("this system allows this user no namespaces" in caplog.messages[0]) == (not encloses)
