"""The kinds of sandbox: which one "auto" is, and what is said where one does not work or does not hold."""

import argparse
import logging
from pathlib import Path

import pytest

from polar_trl.cli import check_tasks, doctor
from polar_trl.errors import ConfigError, SandboxError
from polar_trl.sandbox import build_backend, choose_kind, local
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.local import LocalSandboxBackend, describe_local
from polar_trl.setup.run_setup import RunArguments
from polar_trl.types import Task, TestSpec

PLAIN = Task(id="p", instruction="x")
TESTS = TestSpec(fail_to_pass=("a",), folder="/t", requirements="/t/requirements.txt")


@pytest.mark.parametrize(
    ("image", "task", "kind"),
    [
        (None, {}, "bwrap"),
        ("python:3.11", {}, "docker"),
        (None, {"image": "python:3.11"}, "docker"),
        (None, {"network": "public"}, "docker"),
        (None, {"writable_root": True}, "docker"),
        (None, {"build_context": "/c"}, "docker"),
        (None, {"build_context": "/c", "workspace": "/w"}, "docker"),
        (None, {"build_context": "/c", "workspace": "/w", "tests": TESTS}, "bwrap"),
    ],
)
def test_auto_is_docker_where_an_image_is_asked_for(image: str | None, task: dict[str, object], kind: str) -> None:
    tasks = [PLAIN, Task(id="t", instruction="x", **task)]  # type: ignore[arg-type]
    assert choose_kind("auto", image=image, tasks=tasks) == kind
    assert [choose_kind(name, image=image, tasks=tasks) for name in ("local", "bwrap")] == ["local", "bwrap"]


def test_auto_is_the_default() -> None:
    assert RunArguments(tasks="t").sandbox == "auto"
    subparsers = argparse.ArgumentParser().add_subparsers()
    for command, arguments in ((doctor, []), (check_tasks, ["t"])):
        command.add_parser(subparsers)
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        assert subparsers.choices[name].parse_args(arguments).sandbox == "auto"
    assert isinstance(build_backend("auto"), BwrapSandboxBackend)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="sandbox 'chroot' is not known; known are auto, bwrap, docker, local"):
        build_backend("chroot")


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
