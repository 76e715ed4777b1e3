"""A Podman service of the test's own, as root or as a user, that has the tests' image."""

import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import docker
from faults import IMAGE, list_processes

from polar_trl.sandbox.owner import list_mounts


@contextmanager
def serve(uid: int = 0) -> Iterator[Path]:
    """Yield its socket."""
    folder = Path(tempfile.mkdtemp(prefix="polar-podman-"))
    hard = {
        name: min(resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1], 20_000)
        for name in ("nofile", "nproc")
    }
    limits = [f"{name}={limit}:{limit}" for name, limit in hard.items() if limit > 0]
    (folder / "containers.conf").write_text(
        # Podman asks for more open files than some machines' root may have, and Debian's crun for one kind of groups
        f'[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n[containers]\ndefault_ulimits = {limits}\n'
    )
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/data"\nrunroot = "{folder}/run"\n'
        # a user without further numbers (/etc/subuid) has every file of an image
        + '[storage.options.overlay]\nignore_chown_errors = "true"\n' * (uid != 0)
    )
    (folder / "run").mkdir()
    for path in (folder, *folder.iterdir()):
        os.chown(path, uid, uid)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    become = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--inh-caps=-all"]
    engine = folder / "podman.sock"
    command = [*become, "podman", "system", "service", "--time=0", f"unix://{engine}"]
    service = subprocess.Popen(command, env=environment, cwd=folder, stderr=(folder / "log").open("wb"))
    try:
        while not engine.exists():
            assert service.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        saved = docker.from_env().images.get(IMAGE).save(named=True)
        docker.DockerClient(base_url=f"unix://{engine}").images.load(b"".join(saved))
        yield engine
    finally:
        # beside the service: a user's is a child of it, and each command's watcher stays for minutes
        while left := list_processes(str(folder)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            service.poll()
            time.sleep(0.05)
        for mount in reversed(list_mounts(folder)):
            subprocess.run(["umount", "--lazy", mount], check=True)
        shutil.rmtree(folder)
