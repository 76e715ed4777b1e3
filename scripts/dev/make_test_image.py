#!/usr/bin/env python3
"""Make the container image that the tests use, out of this Debian machine's own packages: no registry is asked.

  DOCKER_HOST=unix:///tmp/polar-trl-engine/docker.sock python scripts/dev/make_test_image.py

Takes a few seconds. The image has a shell, the usual tools, git and Python, and neither Node.js nor pip.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import docker

IMAGE = "polar-trl-test:latest"
PACKAGES = (
    *(
        "base-files",
        "base-passwd",
        "bash",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "findutils",
        "gawk",
        "git",
    ),
    *("grep", "gzip", "hostname", "libc-bin", "mawk", "ncurses-base", "patch", "procps", "python3", "sed", "tar"),
    # what the Node of agents is linked with
    *("util-linux", "ca-certificates", "libstdc++6"),
)
# needed only to install packages
LEFT_OUT = frozenset(("debconf", "dpkg", "perl", "perl-base", "perl-modules-5.36", "libperl5.36", "passwd", "openssl"))
UNWANTED = re.compile(
    r"^/(usr/share/(man|doc|locale|info|lintian|bug|perl)|usr/include)(/|$)|/__pycache__(/|$)|\.pyc$"
)
DEPENDENCY = re.compile(r"^\s*([a-z0-9][a-z0-9+.-]+)")
USRMERGE = ("bin", "sbin", "lib", "lib64")


def read_installed() -> dict[str, list[str]]:
    """Return the packages that each installed one depends on (the first of each list of alternatives)."""
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}\t${Package}\t${Pre-Depends},${Depends}\n"]
    installed = {}
    for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines():
        status, name, depends = line.split("\t")
        if status == "installed":
            found = (DEPENDENCY.match(choice) for choice in depends.split(","))
            installed[name] = [match[1] for match in found if match]
    return installed


def choose_packages() -> list[str]:
    """The wanted packages and all that they need, as far as they are installed."""
    installed = read_installed()
    todo, chosen = [name for name in PACKAGES if name in installed], set[str]()
    while todo:
        name = todo.pop()
        if name in installed and name not in chosen and name not in LEFT_OUT:
            chosen.add(name)
            todo += installed[name]
    return sorted(chosen)


def list_files(packages: list[str]) -> list[str]:
    """Return their files, under the names that they have behind the links from /bin to /usr/bin and so on."""
    listed = subprocess.run(
        ["dpkg-query", "--listfiles", *packages], capture_output=True, text=True, check=True
    ).stdout
    files = set()
    for line in listed.splitlines():
        if line.startswith("/") and line != "/." and not UNWANTED.search(line):
            path = Path(line)
            real = path.parent.resolve() / path.name
            if real.is_symlink() or real.exists():
                files.add(str(real))
    return sorted(files - {f"/{name}" for name in USRMERGE})


def write_tar(files: list[str], path: Path) -> None:
    """The root file system, with the few files and folders that no package owns."""
    owned_by_nobody = ("/etc/passwd", "/etc/group", "/etc/ld.so.cache")
    folders = ("/tmp", "/workspace", "/home/agent", "/proc", "/sys", "/dev", "/run")
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        # an engine refuses an archive that names a path twice
        for name in sorted({*files, *owned_by_nobody} - set(folders)):
            tar.add(name, arcname=name.lstrip("/"), recursive=False)
        for name in USRMERGE:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
        for name in folders:
            folder = tarfile.TarInfo(name.lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)


def main() -> None:
    client = docker.from_env()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "root.tar"
        write_tar(list_files(choose_packages()), path)
        name, _, tag = IMAGE.partition(":")
        changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin", "WORKDIR /workspace"]
        client.api.import_image_from_file(str(path), repository=name, tag=tag, changes=changes)
    size = client.images.get(IMAGE).attrs["Size"]
    print(f"{IMAGE}: {size >> 20} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
