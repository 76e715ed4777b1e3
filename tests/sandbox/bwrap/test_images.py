"""Container images without an engine: pulled or read from an archive, unpacked by layers, and used by agents."""

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import zstandard
from environments import IMAGE, save_image
from registry import Registry, build_image

from polar_trl.errors import SandboxError
from polar_trl.sandbox.bwrap import images
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.bwrap.images import find_image, find_layers, read_image
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.network import NetworkHolder
from polar_trl.types import Task

LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "PAUSES_S", (0.0, 0.0))
    return tmp_path / "cache"


def build_tar(*members: tuple[str, dict[str, Any]]) -> bytes:
    """An archive of members by name, with the attributes of `tarfile.TarInfo`, and `content`."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, attributes in members:
            member = tarfile.TarInfo(name)
            content = attributes.pop("content", b"")
            member.size = len(content)
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def write_archive(path: Path, *layers: bytes, pack: Callable[[bytes], bytes] = bytes, **changes: Any) -> str:
    """An archive of `docker save`."""
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = {"config": {"Env": ["A=b=c"], "WorkingDir": "/srv"}, "rootfs": {"diff_ids": digests}, **changes}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    files = {name: pack(layer) for name, layer in zip(names, layers, strict=True)}
    files["c.json"] = json.dumps(config).encode()
    files["manifest.json"] = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    path.write_bytes(build_tar(*((name, {"content": content}) for name, content in files.items())))
    return str(path)


def compress_halves(content: bytes) -> bytes:
    """Compress in two frames, as Podman does for images of which parts can be fetched."""
    middle = len(content) // 2
    return zstandard.compress(content[:middle]) + zstandard.compress(content[middle:])


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, compress_halves])
def test_layers(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    lower = build_tar(
        ("etc/a", {"content": b"a"}), ("gone/b", {"content": b"b"}), ("./srv", {"type": tarfile.DIRTYPE})
    )
    upper = build_tar(
        ("gone", {"type": tarfile.DIRTYPE, "mode": 0o555, "uid": 7}),
        ("gone/.wh..wh..opq", {}),
        ("gone/sub/new", {"content": b"new", "mode": 0o4444}),
        ("/etc/.wh.a", {}),
        ("etc/link", {"type": tarfile.LNKTYPE, "linkname": "gone/sub/new"}),
        ("lib", {"type": tarfile.SYMTYPE, "linkname": "/usr/lib"}),
        ("lib", {"type": tarfile.SYMTYPE, "linkname": "/usr/lib"}),
        ("lib64", {"type": tarfile.LNKTYPE, "linkname": "lib"}),
        ("dev/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
    )
    image = read_image(find_image(write_archive(tmp_path / "a.tar", lower, upper, pack=pack)))
    assert (image.env, image.workdir, len(image.layers)) == ({"A": "b=c"}, "/srv", 2)
    below, above = (find_layers() / name for name in image.layers)
    assert (below / "etc/a").read_text() == "a" and (below / "srv").is_dir()
    assert os.getxattr(above / "gone", "user.overlay.opaque") == b"y"
    assert stat.S_ISCHR((above / "etc/a").stat().st_mode) and (above / "etc/a").stat().st_rdev == 0
    file = (above / "etc/link").stat()
    assert (stat.S_IMODE(file.st_mode), file.st_nlink, file.st_uid) == (0o644, 2, os.geteuid())
    assert stat.S_IMODE((above / "gone").stat().st_mode) == 0o755
    assert [os.readlink(above / name) for name in ("lib", "lib64")] == ["/usr/lib"] * 2 and not (
        above / "dev/null"
    ).exists()
    # a second image with the same layer below takes it from there
    (below / "mark").touch()
    again = read_image(find_image(write_archive(tmp_path / "b.tar", lower)))
    assert (find_layers() / again.layers[0] / "mark").exists()


HOSTILE = {
    "a name": (("../x", {"content": b"x"}),),
    "a mark of deletion": (("a/../../.wh.x", {}),),
    "a mark of the folder above": ((".wh...", {}),),
    "a link": (("l", {"type": tarfile.SYMTYPE, "linkname": "../../.."}), ("l/x", {"content": b"x"})),
    "an absolute link": (("l", {"type": tarfile.SYMTYPE, "linkname": "/etc"}), ("l/.wh.x", {})),
    "a hard link": (("h", {"type": tarfile.LNKTYPE, "linkname": "../../../victim"}), ("h", {"content": b"x"})),
    "a hard link by a link": (
        ("l", {"type": tarfile.SYMTYPE, "linkname": "../../../.."}),
        ("h", {"type": tarfile.LNKTYPE, "linkname": "l/victim"}),
    ),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_layer_that_leads_outside_is_refused(tmp_path: Path, cache: Path, how: str) -> None:
    (tmp_path / "victim").write_text("whole")
    members = [(name, dict(attributes)) for name, attributes in HOSTILE[how]]
    archive = write_archive(tmp_path / "a.tar", build_tar(*members))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SandboxError, match=r"a\.tar is no archive .* outside the destination"):
        find_image(archive)
    assert (tmp_path / "victim").read_text() == "whole" and (tmp_path / "victim").stat().st_nlink == 1
    assert sorted({path.name for path in tmp_path.iterdir()} - {"cache"}) == before
    assert [path.name for path in (cache / "images").rglob("*") if not path.name.endswith(".lock")] == ["layers"]


def test_archives_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with pytest.raises(SandboxError, match=r"there is no archive .*a\.tar \(No such file"):
        find_image(str(path))
    for content in (b"no tar", build_tar(("a", {})), build_tar(("manifest.json", {"content": b"[{}, {}]"}))):
        path.write_bytes(content)
        with pytest.raises(SandboxError, match=r"a\.tar is no archive of `docker save` that can be unpacked: ."):
            find_image(str(path))
    for config in ("x", {"Env": [1]}, {"Env": ["=x"]}, {"Env": ["A=x\0--bind\0/\0/srv"]}, {"WorkingDir": []}):
        with pytest.raises(SandboxError, match=r"a\.tar is no archive of `docker save` that can be unpacked: ."):
            find_image(write_archive(path, build_tar(("a", {})), config=config))
    late = build_tar(("a", {"pax_headers": {"mtime": "1e30"}}))
    with pytest.raises(SandboxError, match=r"a\.tar is no archive of `docker save` that can be unpacked: ."):
        find_image(write_archive(path, late))
    wrong = write_archive(path, build_tar(("a", {})), rootfs={"diff_ids": ["sha256:00"]})
    with pytest.raises(SandboxError, match=r"a layer is sha256:\w{64} and should be sha256:00"):
        find_image(wrong)


def test_a_layer_that_comes_twice_is_mounted_once(tmp_path: Path) -> None:
    empty, first, second = build_tar(), build_tar(("a", {"content": b"1"})), build_tar(("a", {"content": b"2"}))
    image = read_image(find_image(write_archive(tmp_path / "a.tar", first, empty, second, empty, first)))
    layers = [find_layers() / name for name in image.layers]
    assert [[path.read_text() for path in layer.iterdir()] for layer in layers] == [["2"], [], ["1"]]


def test_a_folder_that_is_uploaded_again_replaces_the_one_before(tmp_path: Path) -> None:
    image = write_archive(tmp_path / "a.tar", build_tar(), build_tar(("a", {})), build_tar(), config={})
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state")
    box = backend.create(Task(id="t", instruction="", image=image, writable_root=True), "s")
    try:
        for text in "123":
            (tmp_path / "up").mkdir(exist_ok=True)
            (tmp_path / "up" / "file").write_text(text)
            box.upload(tmp_path / "up", "/tests")
        assert [path.read_text() for path in (box.host_workdir.parent / "uploads").rglob("file")] == ["3"]
    finally:
        box.destroy()


def test_a_name_that_is_none_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SandboxError, match=r"^the image http://x/y could not be pulled: .* cannot contain a scheme"):
        find_image("http://x/y")
    assert "trying again" not in caplog.text


def test_an_image_is_pulled_once() -> None:
    with Registry(failures=2) as registry:
        image = read_image(find_image(registry.name("one")))
        assert (find_layers() / image.layers[0] / "srv/one/file").read_text() == "one"
        assert registry.asked["one"] == 3
        assert read_image(find_image(registry.name("one"))) == image and registry.asked["one"] == 3
        digest = f"sha256:{hashlib.sha256(build_image('one')['manifest']).hexdigest()}"
        assert read_image(find_image(f"{registry.name('one')}@{digest}")) == image and registry.asked["one"] == 3
        with pytest.raises(SandboxError, match=f"gave a manifest {digest} in place of sha256:0"):
            find_image(f"{registry.name('one')}@sha256:{64 * '0'}")


def test_an_image_that_cannot_be_pulled() -> None:
    with Registry(failures=9) as registry:
        registry.missing.add("none")
        with pytest.raises(SandboxError, match=r"^the image 127\S+/none:1 could not be pulled: 404"):
            find_image(registry.name("none"))
        assert registry.asked["none"] == 1
        with pytest.raises(SandboxError, match=r"^the image 127\S+/one:1 could not be pulled: 500"):
            find_image(registry.name("one"))
        assert registry.asked["one"] == 3
    with pytest.raises(SandboxError, match="could not be pulled"):
        find_image(registry.name("one"))


def test_an_image_that_cannot_be_pulled_says_nothing_about_the_kernel(tmp_path: Path) -> None:
    """A sandbox without a user namespace would be made for it, if the registry was there again."""
    with Registry(failures=3) as registry:
        with pytest.raises(SandboxError, match=r"^task trial: the image \S+ could not be pulled: 500"):
            BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state", image=registry.name("one"))
        assert registry.asked["one"] == 3


def test_what_was_given_up_is_not_tried_again() -> None:
    stopped = threading.Event()
    with Registry(failures=9) as registry:
        with pytest.raises(SandboxError, match="given up"):
            find_image(registry.name("one"), is_stopped=stopped.is_set, pause=lambda _: stopped.set())
        assert registry.asked["one"] == 1


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[str]:
    """The tests' image with a layer that removes Python and replaces a folder, and settings of its own."""
    client, name = docker.from_env(), "polar-trl-test:changed"
    command = (
        "rm /usr/bin/python3; rm -r /usr/share/git-core; mkdir -p /usr/share/git-core /srv/app; echo in > /srv/app/f"
    )
    container = client.containers.run(IMAGE, ["sh", "-c", command], network_mode="none", detach=True)
    try:
        assert container.wait()["StatusCode"] == 0
        container.commit(*name.split(":"), changes=["ENV GREETING=hello", "WORKDIR /srv/app"])
        yield save_image(name, tmp_path)
    finally:
        container.remove(force=True)
        client.images.remove(name)
        client.close()


@pytest.mark.containers
def test_a_sandbox_in_an_image(tmp_path: Path, archive: str) -> None:
    parent = tempfile.TemporaryDirectory(dir="/var/tmp")
    shown = Path(parent.name, "below")
    shown.mkdir()
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state", image=archive, mounts=[shown])
    backend.prepare([Task(id="t", instruction="")])
    box = backend.create(Task(id="t", instruction="", image=archive, writable_root=True), "s")
    try:
        command = "pwd; cat f; echo $GREETING; ls /usr/share/git-core; command -v python3; touch /usr/new; id -u"
        assert box.run(command, env={}, timeout_s=60).stdout == "/srv/app\nin\nhello\n0\n"
        assert box.base_tree is not None and (box.base_tree / "f").read_text() == "in\n"
        # the limit of the disk holds for the image's files too
        full = box.run("head -c 100M /dev/zero > /usr/big; rm /usr/big", env={}, timeout_s=60)
        assert "No space left" in full.stderr
        # a link where something is mounted would be followed out of the sandbox
        victim = tmp_path / "victim"
        victim.mkdir()
        trap = f"mv {shown.parent} /x; ln -s /oldroot{victim} {shown.parent}; ls -l {shown.parent}"
        assert str(victim) in box.run(trap, env={}, timeout_s=60).stdout
        assert box.run("touch ~/f; ls /usr/new", env={}, timeout_s=60).stdout == "/usr/new\n"
        assert list(victim.iterdir()) == []
        (tmp_path / "up").mkdir()
        (tmp_path / "up" / "t").write_text("tests")
        for _ in range(2):
            box.upload(tmp_path / "up", "/tests")
            assert box.run("cat /tests/t; echo > /tests/t", env={}, timeout_s=60).stdout == "tests"
    finally:
        box.destroy()
        parent.cleanup()
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.containers
def test_what_is_refused(tmp_path: Path, archive: str) -> None:
    backend = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state")
    for task, why in (
        (Task(id="t", instruction="", image=archive, network="public"), "asks for the public one; use the docker"),
        (Task(id="t", instruction="", writable_root=True), "without an image, .* wants to change"),
        (Task(id="t", instruction="", image=archive, workdir="/none"), "/none cannot be taken out of .*No such file"),
        (Task(id="t", instruction="", image="/none.tar"), r"there is no archive /none\.tar"),
    ):
        with pytest.raises(SandboxError, match=f"^task t: .*{why}"):
            backend.prepare([task])
    box = backend.create(Task(id="t", instruction="", image=archive), "s")
    try:
        assert box.run("touch /usr/new", env={}, timeout_s=60).exit_code == 1
        with pytest.raises(SandboxError, match="the task's root is read-only"):
            box.upload(tmp_path, "/tests")
    finally:
        box.destroy()
    assert list((tmp_path / "state").iterdir()) == []


def test_where_layers_cannot_be_mounted(tmp_path: Path) -> None:
    options = f"lowerdir={tmp_path},upperdir=/proc,workdir=/proc"
    with pytest.raises(SandboxError, match=r"layers cannot be mounted here \(.*overlay: .*\); .* \(TMPDIR\)"):
        NetworkHolder("mark", (str(tmp_path), options, str(tmp_path)))


def test_a_folder_below_tmp_that_an_agent_moved_away(tmp_path: Path) -> None:
    shown, victim = tmp_path / "shown" / "below", tmp_path / "victim"
    shown.mkdir(parents=True)
    victim.mkdir()
    box = BwrapSandboxBackend(limits=LIMITS, root=tmp_path / "state", mounts=[shown]).create(
        Task(id="t", instruction=""), "s"
    )
    try:
        box.run(f"mv {shown.parent} /tmp/x && ln -s /oldroot{victim} {shown.parent}", env={}, timeout_s=60)
        assert (box.host_workdir.parent / "tmp" / shown.parent.relative_to("/tmp")).is_symlink()
        assert box.run(f"ls {shown.parent}", env={}, timeout_s=60).stdout == "below\n"
        assert list(victim.iterdir()) == []
    finally:
        box.destroy()
