"""Images and trees are pulled, built and extracted once, and errors name the task."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from registry import Registry
from serving import wait_until

from polar_trl.errors import SandboxError
from polar_trl.sandbox.docker.backend import OWNER_LABEL, DockerSandboxBackend
from polar_trl.sandbox.docker.client import Removals, connect
from polar_trl.sandbox.docker.images import MAX_FETCHES, PULL_PAUSES_S, Images
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.owner import build_owner_tag
from polar_trl.types import Task

pytestmark = pytest.mark.containers

IMAGE = "polar-trl-test:latest"
MADE_HERE = "polar-trl.test-images"
"""Label of what these tests build."""
LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[docker.DockerClient]:
    """Yield an engine, with a cache of this test's own; its images are removed, and no container may be left."""
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "cache"))
    client = docker.from_env()
    yield client
    left = client.api.containers(all=True, filters={"label": f"{OWNER_LABEL}={build_owner_tag()}"})
    for image in client.images.list():
        if MADE_HERE in image.labels or any(tag.startswith("127.0.0.1:") for tag in image.tags):
            client.images.remove(image.id, force=True)
    assert left == []


@pytest.fixture
def build_backend(tmp_path: Path, engine: docker.DockerClient) -> Callable[..., DockerSandboxBackend]:
    return lambda **settings: DockerSandboxBackend(limits=LIMITS, root=tmp_path / "state", **settings)


@pytest.fixture
def build_images(engine: docker.DockerClient) -> Callable[..., Images]:
    def build(**settings: object) -> Images:
        client = connect(None)
        return Images(client, Removals(client), **settings)

    return build


def build_task(**fields: object) -> Task:
    return Task(**{"id": "the-task", "instruction": "x"} | fields)


def write_context(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text("\n".join((f"FROM {IMAGE}", f"LABEL {MADE_HERE}=yes", *lines)) + "\n")
    return folder


def write_repository(folder: Path) -> None:
    """Write a repository with a file that all may write, and a later commit on another branch."""
    folder.mkdir(parents=True)

    def git(*words: str) -> None:
        subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    (folder / "code.py").write_text("old\n")
    (folder / "link").symlink_to("/usr/bin/env")
    git("add", "-A")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "fix")
    (folder / "code.py").write_text("new\n")
    git("commit", "-qam", "the fix")
    git("checkout", "-q", "main")
    os.chmod(folder / "code.py", 0o666)


def test_the_work_folder_begins_as_what_the_image_has(
    build_backend: Callable[..., DockerSandboxBackend], engine: docker.DockerClient, tmp_path: Path
) -> None:
    context = write_context(
        tmp_path / "context", "COPY app /srv/real", "RUN ln -s real /srv/app; chown -R 1234:1235 /srv/real"
    )
    write_repository(context / "app")
    engine.images.build(path=str(context), tag="polar-images-app", rm=True)
    task = build_task(image="polar-images-app", workdir="/srv/app", files={"note": "n\n"})
    backend = build_backend()
    backend.prepare([task])
    (prepared,) = (tmp_path / "cache" / "trees").glob("app-*")
    boxes = [backend.create(task, name) for name in ("one", "two")]
    try:
        box, other = boxes
        look = "pwd; cat code.py note; stat -c '%u %g %a' code.py; readlink link; git rev-list --all | wc -l"
        result = box.run(look, env={}, timeout_s=20)
        # whoever owned it in the image: it is the agent's to change
        assert result.stdout == "/srv/real\nold\nn\n0 0 666\n/usr/bin/env\n1\n", result.stderr
        assert box.workdir == "/srv/app" and box.base_tree == other.base_tree == prepared
        assert box.run("echo mine > code.py; rm link", env={}, timeout_s=20).exit_code == 0
        assert (box.host_workdir / "code.py").read_text() == "mine\n"
        assert other.run("cat code.py; readlink link", env={}, timeout_s=20).stdout == "old\n/usr/bin/env\n"
    finally:
        for box in boxes:
            box.destroy()
    assert (prepared / "code.py").read_text() == "old\n" and not (prepared / "note").exists()


def test_a_work_folder_that_the_image_lacks(build_backend: Callable[..., DockerSandboxBackend]) -> None:
    backend = build_backend()
    with pytest.raises(SandboxError, match=rf"task the-task: the image {IMAGE} has no folder /srv/nothing"):
        backend.prepare([build_task(image=IMAGE, workdir="/srv/nothing")])
    with pytest.raises(SandboxError, match=rf"task the-task: /etc/passwd cannot be taken out of the image {IMAGE}"):
        backend.create(build_task(image=IMAGE, workdir="/etc/passwd"), "s")


@pytest.mark.parametrize("path", ["app", "/", "/home", "/home/agent", "/tmp", "/proc/x", "/srv/../etc"])
def test_work_folders_that_cannot_be(build_backend: Callable[..., DockerSandboxBackend], path: str) -> None:
    with pytest.raises(SandboxError, match=f"task the-task: the work folder cannot be '{path}'"):
        build_backend(image=IMAGE).prepare([build_task(workdir=path)])


def test_a_workspace_is_laid_at_the_work_folder(
    build_backend: Callable[..., DockerSandboxBackend], tmp_path: Path
) -> None:
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "a").write_text("a\n")
    # the image has no such folder
    box = build_backend(image=IMAGE).create(build_task(workdir="/app/x", workspace=str(tmp_path / "space")), "s")
    try:
        assert box.run("pwd; cat /app/x/a", env={}, timeout_s=20).stdout == "/app/x\na\n"
    finally:
        box.destroy()


def test_an_image_is_built_once_from_its_context(
    build_backend: Callable[..., DockerSandboxBackend], engine: docker.DockerClient, tmp_path: Path
) -> None:
    context = write_context(tmp_path / "context", "WORKDIR /srv/app", "COPY hello .", "RUN date +%s%N > /stamp")
    (context / "hello").write_text("hello\n")
    task = build_task(build_context=str(context))

    def read(backend: DockerSandboxBackend) -> str:
        box = backend.create(task, "s")
        try:
            # where the Dockerfile says that its commands start
            return box.run("pwd; cat hello /stamp", env={}, timeout_s=20).stdout
        finally:
            box.destroy()

    first = read(build_backend())
    assert first.startswith("/srv/app\nhello\n")
    assert read(build_backend()) == first
    (context / "hello").write_text("changed\n")
    assert read(build_backend()).startswith("/srv/app\nchanged\n")
    built = engine.images.list(filters={"label": MADE_HERE})
    assert sum(tag.startswith("polar-trl-task:") for image in built for tag in image.tags) == 2


def test_a_run_with_an_image_builds_none(build_backend: Callable[..., DockerSandboxBackend], tmp_path: Path) -> None:
    context = write_context(tmp_path / "context", "RUN false")
    box = build_backend(image=IMAGE).create(build_task(build_context=str(context)), "s")
    try:
        assert box.run("pwd", env={}, timeout_s=20).stdout == "/workspace\n"
    finally:
        box.destroy()


def test_a_build_that_fails_shows_the_end_of_its_log(
    build_backend: Callable[..., DockerSandboxBackend], tmp_path: Path
) -> None:
    context = write_context(tmp_path / "context", "RUN echo about to fail; no-such-program --now")
    with pytest.raises(SandboxError) as caught:
        build_backend().prepare([build_task(build_context=str(context))])
    message = str(caught.value)
    assert message.startswith(f"task the-task: its image could not be built from {context} (`docker build -t polar-")
    assert "returned a non-zero code: 127" in message
    assert "about to fail\n" in message and "no-such-program: not found" in message
    with pytest.raises(SandboxError, match=f"task the-task: there is no Dockerfile in {tmp_path}"):
        build_backend().prepare([build_task(build_context=str(tmp_path))])


def test_no_image_at_all(build_backend: Callable[..., DockerSandboxBackend]) -> None:
    with pytest.raises(SandboxError, match="task the-task names no image, and the run has none; set sandbox_image"):
        build_backend().create(build_task(), "s")


def test_a_registry_that_fails_at_first(
    build_images: Callable[..., Images], capsys: pytest.CaptureFixture[str]
) -> None:
    with Registry(failures=2) as registry:
        images = build_images(pauses_s=(0.1, 0.2, 0.3, 0.4))
        task = build_task(image=registry.name("late"), workdir="/srv/late")
        images.prepare([task, task])
        tree = images.find(task).tree
        assert registry.failures == 0 and registry.asked["late"] >= 1
    assert tree is not None and (tree / "file").read_text() == "late"
    assert "images:" not in capsys.readouterr().err, "one image is worth no bar"


def test_a_few_at_a_time_and_others_are_not_kept_waiting(
    build_images: Callable[..., Images],
    build_backend: Callable[..., DockerSandboxBackend],
) -> None:
    names = [f"image{number}" for number in range(MAX_FETCHES + 3)]
    with Registry() as registry:
        registry.gate.clear()
        images = build_images()
        tasks = [build_task(id=name, image=registry.name(name), workdir=f"/srv/{name}") for name in names]
        thread = threading.Thread(target=images.prepare, args=(tasks,))
        thread.start()
        try:
            # the manifest is asked for by HEAD or by GET first, depending on the engine
            wait_until(lambda: len(registry.waiting) == MAX_FETCHES)
            present = images.find(build_task(image=IMAGE, workdir="/workspace"))
            assert present.tree is not None and thread.is_alive()
            assert len(registry.waiting) == MAX_FETCHES
        finally:
            registry.gate.set()
            thread.join()
        assert [images.find(task).image for task in tasks] == [registry.name(name) for name in names]
        assert registry.most_waiting == MAX_FETCHES


def test_a_transfer_that_stands_still_is_given_up(build_images: Callable[..., Images]) -> None:
    with Registry(stalls=True) as registry:
        images = build_images(silence_s=1.0, pauses_s=(0.1,))
        name = registry.name("stuck")
        with pytest.raises(SandboxError) as caught:
            images.prepare([build_task(image=name)])
        message = str(caught.value)
        assert message.startswith(f"task the-task: the image {name} is not here and could not be pulled (try `docker ")
        assert "timed out" in message.lower()
        assert registry.stalled.acquire(timeout=0) and registry.stalled.acquire(timeout=0), "it was tried once only"


def test_an_image_that_no_registry_has(build_images: Callable[..., Images]) -> None:
    with Registry() as registry:
        name = f"{registry.address}/unknown:1"
        registry.missing.add("unknown")
        with pytest.raises(SandboxError, match=f"task the-task: the image {name} is not here and could not be pulled"):
            build_images().prepare([build_task(image=name)])
        assert 0 < registry.asked["unknown"] < 1 + len(PULL_PAUSES_S), "what is not there was asked for again"


def test_the_first_failure_stops_the_others(build_images: Callable[..., Images]) -> None:
    with Registry() as registry:
        registry.missing.add("unknown")
        tasks = [build_task(id=name, image=registry.name(name)) for name in ("unknown", "a", "b", "c", "d", "e")]
        images = build_images()
        with pytest.raises(SandboxError, match="task unknown: "):
            images.prepare(tasks)
        images.prepare(tasks[1:])
        assert all(images.knows(task) for task in tasks[1:])


def test_an_image_that_is_removed_is_made_again(
    build_backend: Callable[..., DockerSandboxBackend], engine: docker.DockerClient, tmp_path: Path
) -> None:
    context = write_context(tmp_path / "context", "RUN echo once > /stamp")
    task = build_task(build_context=str(context))
    backend = build_backend()
    backend.create(task, "s").destroy()
    (image,) = engine.images.list(filters={"label": MADE_HERE})
    engine.images.remove(image.id, force=True)
    with pytest.raises(SandboxError, match="task the-task: no container could be started from polar-trl-task:"):
        backend.create(task, "s")
    backend.create(task, "s").destroy()
