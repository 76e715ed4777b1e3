"""Name the image of the tests' containers, and install pytest where they look for it."""

import importlib.util
import shutil
import venv
from pathlib import Path

import docker

from polar_trl.tasks.build.suite import find_environment

IMAGE = "polar-trl-test:latest"


def install_pytest(requirements: Path) -> None:
    """Make the environment of a requirements file, as pip would, with this one's pytest: containers see the cache."""
    folder = find_environment(requirements)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    copy_pytest(site)
    (folder / ".installed").touch()


def copy_pytest(site: Path) -> None:
    """Copy this environment's pytest, and what it needs, into a folder of packages."""
    site.mkdir(parents=True, exist_ok=True)
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, site / name)
        else:
            shutil.copy2(origin, site)


def save_image(name: str, folder: Path) -> str:
    """Save an image of the tests' engine to an archive that everybody may read; its path."""
    client = docker.from_env()
    archive = folder / "image.tar"
    with archive.open("wb") as file:
        file.writelines(client.images.get(name).save(named=True))
    client.close()
    return str(archive)
