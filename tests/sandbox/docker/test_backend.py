"""The Docker backend with engines that hang, restart or are missing, and tasks that ask for the impossible.

Needs root. Tests that freeze an engine start their own.
"""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from faults import IMAGE, LIMITS, Leftovers, OwnEngine
from serving import wait_until

from polar_trl.errors import SandboxError
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.docker import client
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.docker.client import Removals, connect, limit_calls
from polar_trl.types import Task

pytestmark = pytest.mark.containers

HOG = "python3 -c 'x = bytearray(500 << 20)'; echo rc $?"
CONNECT = "python3 -c \"import socket; print(socket.create_connection(('{}', {}), 5).recv(100))\""


def build_backend(root: Path, **settings: Any) -> DockerSandboxBackend:
    return DockerSandboxBackend(limits=LIMITS, root=root, image=IMAGE, **settings)


def build_task(**fields: Any) -> Task:
    return Task(**{"id": "the-task", "instruction": "x"} | fields)


@pytest.fixture
def backend(tmp_path: Path) -> DockerSandboxBackend:
    return build_backend(tmp_path / "state")


@pytest.fixture(scope="module")
def own_engine() -> Iterator[OwnEngine]:
    engine = OwnEngine()
    try:
        engine.up()
        engine.load_image()
        yield engine
    finally:
        engine.thaw()
        engine.down()


def test_a_folder_is_uploaded_over_what_is_there(backend: DockerSandboxBackend, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "sub").mkdir(parents=True)
    (tests / "sub" / "new").write_text("new\n")
    (tests / "test.sh").write_text("#!/bin/sh\necho ran\n")
    (tests / "test.sh").chmod(0o755)
    (tests / "link").symlink_to("sub/new")
    (tmp_path / "empty").mkdir()
    box = backend.create(build_task(writable_root=True), "s")
    try:
        plant = "mkdir -p /tests/sub /opt/deep; echo planted > /tests/sub/conftest.py; ln -s /opt/deep /lnk"
        # a program of the container's that lies can do nothing about it
        lie = "chmod 0 /tests; printf '#!/bin/sh\\n' > /usr/bin/rm"
        assert box.run(f"{plant}; {lie}", env={}, timeout_s=20).exit_code == 0
        box.upload(tests, "/tests")
        box.upload(tests, "/opt/new/parents/here")
        box.upload(tests / "sub", "/lnk/behind")
        look = "find /tests | sort; /tests/test.sh; cat /tests/link; stat -c '%u %a' /tests/test.sh /tests/sub"
        result = box.run(f"{look}; cat /opt/new/parents/here/sub/new /opt/deep/behind/new", env={}, timeout_s=20)
        assert result.stdout == (
            "/tests\n/tests/link\n/tests/sub\n/tests/sub/new\n/tests/test.sh\nran\nnew\n0 755\n0 755\nnew\nnew\n"
        ), result.stderr
        box.upload(tmp_path / "empty", "/tests")
        assert box.run("ls -A /tests; test -d /tests && echo there", env={}, timeout_s=20).stdout == "there\n"
        running = threading.Thread(
            target=lambda: box.run("until [ -e /tests/new ]; do sleep 0.1; done", env={}, timeout_s=60)
        )
        running.start()
        box.upload(tests / "sub", "/tests")
        running.join(30)
        assert not running.is_alive()
        for target in ("tests", "/", "/a/../b", "/a\0b"):
            with pytest.raises(SandboxError, match="no absolute path"):
                box.upload(tests, target)
        with pytest.raises(SandboxError, match="it is no folder of this machine"):
            box.upload(tmp_path / "missing", "/tests")
    finally:
        box.destroy()


def test_the_root_is_written_where_the_task_says_so_only(backend: DockerSandboxBackend, tmp_path: Path) -> None:
    write = "echo x > /usr/planted && cat /usr/planted"
    for is_writable, printed in ((True, "x\n"), (False, "")):
        box = backend.create(build_task(writable_root=is_writable), "s")
        try:
            assert box.run(write, env={}, timeout_s=20).stdout == printed
            if not is_writable:
                with pytest.raises(SandboxError, match=r"cannot upload to /tests: the task's root is read-only"):
                    box.upload(tmp_path, "/tests")
        finally:
            box.destroy()


@pytest.fixture
def user_network() -> Iterator[Any]:
    network = docker.from_env().networks.create("polar-test-public", driver="bridge")
    yield network
    network.remove()


def test_a_public_network_besides_the_proxy(tmp_path: Path, user_network: Any) -> None:
    user_network.reload()
    gateway = user_network.attrs["IPAM"]["Config"][0]["Gateway"]
    public = build_backend(tmp_path / "state", public_network="polar-test-public")
    box = public.create(build_task(network="public"), "s")
    cut_off = public.create(build_task(), "s")
    try:
        listener = box.open_listener()
        server = threading.Thread(target=serve_once, args=(listener, b"the proxy"))
        server.start()
        assert box.run(CONNECT.format("127.0.0.1", 8080), env={}, timeout_s=20).stdout == "b'the proxy'\n"
        server.join()
        interfaces = "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' ' | sort | tr '\\n' ' '"
        assert "eth0" in box.run(interfaces, env={}, timeout_s=20).stdout.split()
        assert "eth0" not in cut_off.run(interfaces, env={}, timeout_s=20).stdout.split()
        # the gateway is this machine: there it answers, if only that nothing listens
        reach = CONNECT.format(gateway, 1)
        assert "refused" in box.run(reach, env={}, timeout_s=20).stderr
        assert "unreachable" in cut_off.run(reach, env={}, timeout_s=20).stderr
    finally:
        box.destroy()
        cut_off.destroy()


def serve_once(listener: Any, answer: bytes) -> None:
    with listener:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)


def test_a_public_network_that_is_not_there(tmp_path: Path) -> None:
    backend = build_backend(tmp_path / "state", public_network="polar-none")
    with pytest.raises(SandboxError, match="task the-task asks for the public network, and the engine has no network"):
        backend.create(build_task(network="public"), "s")
    assert list((tmp_path / "state").iterdir()) == []
    with pytest.raises(SandboxError, match="task the-task: bubblewrap has no network but the proxy"):
        BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state").create(build_task(network="public"), "s")


def test_memory_kills_are_known_however_much_else_happens(backend: DockerSandboxBackend) -> None:
    client = docker.from_env()
    box, other = backend.create(build_task(), "s"), backend.create(build_task(), "s")
    try:

        def make_events() -> None:
            wait_until(lambda: box.get("killed") is not None)
            # an engine remembers its last 256 events
            (noisy,) = [
                one for one in client.containers.list(ignore_removed=True) if find_source(one) == other.host_workdir
            ]
            for _ in range(300):
                client.api.exec_create(noisy.id, ["true"])
            box.put("go", b"")

        noise = threading.Thread(target=make_events)
        noise.start()
        command = f"{HOG}; touch killed; until [ -e go ]; do sleep 0.1; done"
        result = box.run(command, env={}, timeout_s=120)
        noise.join()
        assert (result.stdout, result.exit_code, result.out_of_memory) == ("rc 137\n", 0, True)
        assert not box.run("true", env={}, timeout_s=20).out_of_memory
    finally:
        box.destroy()
        other.destroy()


def find_source(container: Any) -> Path | None:
    mounts = container.attrs["Mounts"]
    return next((Path(mount["Source"]) for mount in mounts if mount["Destination"] == "/workspace"), None)


def test_an_engine_that_was_restarted_does_all_it_did(own_engine: OwnEngine, tmp_path: Path) -> None:
    backend = build_backend(tmp_path / "state", host=own_engine.host)
    victim = backend.create(build_task(), "victim")
    try:
        own_engine.restart(signal.SIGTERM)
        with pytest.raises(SandboxError, match="the container is gone"):
            victim.run("true", env={}, timeout_s=20)
    finally:
        victim.destroy()
    box = backend.create(build_task(), "next")
    try:
        result = box.run(HOG, env={}, timeout_s=60)
        assert (result.stdout, result.out_of_memory, result.disk_full) == ("rc 137\n", True, False)
        assert box.run("dd if=/dev/zero of=big bs=1M count=500 2>/dev/null", env={}, timeout_s=60).disk_full
        daemon = "(setsid sh -c 'while :; do date > /tmp/alive; sleep 0.05; done' >/dev/null 2>&1 &); echo done"
        assert box.run(daemon, env={}, timeout_s=20).stdout == "done\n"
        look = "cat /proc/[0-9]*/comm | grep -c date; rm -f big /tmp/alive; sleep 0.3; ls /tmp"
        assert box.run(look, env={}, timeout_s=20).stdout == "0\n"
        assert box.run("sleep 60", env={}, timeout_s=1).timed_out
        assert box.run("echo fine", env={}, timeout_s=20).stdout == "fine\n"
    finally:
        box.destroy()
    backend.close()


def test_what_a_frozen_engine_makes_too_late_is_removed(own_engine: OwnEngine, tmp_path: Path) -> None:
    root = tmp_path / "state"
    backend = build_backend(root, host=own_engine.host, api_timeout_s=30)
    task = build_task(prepare_timeout_s=3.0)
    backend.prepare([task])
    leftovers = Leftovers(root, "no-such-token", own_engine.connect())
    failures: list[Exception] = []

    def create(name: str) -> None:
        try:
            backend.create(task, name).destroy()
        except SandboxError as error:
            failures.append(error)

    own_engine.freeze()
    try:
        threads = [threading.Thread(target=create, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            # the engine's own limit is not what ends it
            thread.join(25)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        own_engine.thaw()
    assert len(failures) == 2
    assert all("task the-task: no container could be started from" in str(error) for error in failures)
    backend.create(build_task(), "next").destroy()
    backend.close()
    wait_until(lambda: leftovers.find() == {})


def test_a_container_that_was_given_up_and_is_made_all_the_same(
    own_engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LATE_S", 30.0)
    engine = connect(own_engine.host)
    removals = Removals(engine)
    own_engine.freeze()
    try:
        with pytest.raises(requests.ReadTimeout), limit_calls(time.monotonic() + 1), removals.expect("polar-late"):
            engine.api.create_container(IMAGE, ["true"], name="polar-late")
    finally:
        own_engine.thaw()
    # it is made a moment later, or the engine saw that nobody waits and took it back: then it is forgotten in the end
    wait_until(lambda: removals.sweep() == 0)
    assert engine.api.containers(all=True, filters={"name": "polar-late"}) == []
    # one that is not there yet is not forgotten
    with pytest.raises(requests.ReadTimeout), removals.expect("polar-never"):
        raise requests.ReadTimeout
    assert removals.sweep() == 1
    removals = Removals(engine)
    # what the engine refuses it will not make later
    with pytest.raises(docker.errors.ImageNotFound), removals.expect("polar-refused"):
        engine.api.create_container("polar-no-such-image", ["true"], name="polar-refused")
    assert removals.sweep() == 0


def test_a_destroyed_sandbox_of_a_frozen_engine_is_removed_later(own_engine: OwnEngine, tmp_path: Path) -> None:
    backend = build_backend(tmp_path / "state", host=own_engine.host, api_timeout_s=2)
    box = backend.create(build_task(), "a")
    leftovers = Leftovers(tmp_path / "state", "no-such-token", own_engine.connect())
    own_engine.freeze()
    try:
        with pytest.raises(SandboxError, match="its engine does not answer"):
            box.run("true", env={}, timeout_s=20)
        box.destroy()
    finally:
        own_engine.thaw()
    backend.close()
    wait_until(lambda: leftovers.find() == {})


@pytest.mark.parametrize("host", ["ssh://me@far", "tcp://10.0.0.1:2375"])
def test_engines_elsewhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(SandboxError) as caught:
        build_backend(tmp_path / "state")
    message = str(caught.value)
    assert message.startswith(f"DOCKER_HOST is {host}, which is no unix socket of this machine. ")
    assert message.endswith("Run the trainer on the engine's machine, with DOCKER_HOST=unix:///var/run/docker.sock")


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(
        SandboxError, match=r"no container engine answers at unix:///.*none.sock \(.*start Docker or Podman"
    ):
        build_backend(tmp_path / "state", host=f"unix://{tmp_path}/none.sock")
    (tmp_path / "dead.sock").write_text("")
    with pytest.raises(SandboxError, match="no container engine answers at"):
        build_backend(tmp_path / "state", host=f"unix://{tmp_path}/dead.sock")


def test_the_first_socket_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("podman.sock", "later.sock"):
        (tmp_path / name).write_text("")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(client, "SOCKETS", [f"{tmp_path}/{name}.sock" for name in ("docker", "podman", "later")])
    with pytest.raises(SandboxError, match=f"no container engine answers at unix://{tmp_path}/podman.sock"):
        connect(None)
