"""Pull container images from a registry over its HTTP API, without a container engine.

Names are read as Docker reads them, and so are the logins in ~/.docker/config.json.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable
from typing import Any, BinaryIO

import docker.auth
import docker.utils
import requests
import urllib3
from dxf import DXF
from dxf.exceptions import DXFError

from polar_trl.errors import SandboxError

__all__ = ["RETRIED", "DXFError", "RemoteImage"]

HUB = "registry-1.docker.io"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SILENCE_S = 120.0
CHUNK_BYTES = 1 << 20
RETRIED = (requests.RequestException, urllib3.exceptions.HTTPError)
"""Failures of the network, which another try may not meet."""
_LOCAL = re.compile(r"(localhost|127\.[\d.]+)(:\d+)?")


class RemoteImage:
    """An image of a registry.

    Args:
        name: Such as "python:3.11", "ghcr.io/owner/name@sha256:...".
        is_stopped: Asked between two parts of a download, which ends with a `SandboxError` then.

    Raises `SandboxError` where the registry has no such image for this machine, and errors of `RETRIED`.
    """

    def __init__(self, name: str, is_stopped: Callable[[], bool]) -> None:
        repository, tag = docker.utils.parse_repository_tag(name)
        if "@" in name:  # a digest decides, and a tag beside it says what it was
            repository, _ = docker.utils.parse_repository_tag(repository)
        index, path = docker.auth.resolve_repository_name(repository)
        login = docker.auth.load_config().resolve_authconfig(index) or {}
        self._is_stopped = is_stopped
        self._registry = DXF(
            HUB if index == docker.auth.INDEX_NAME else index,
            path,
            lambda dxf, reply: dxf.authenticate(login.get("username"), login.get("password"), response=reply),
            insecure=_LOCAL.fullmatch(index) is not None,
            timeout=SILENCE_S,
        )
        manifest = self._read_manifest(tag or "latest")
        if "manifests" in manifest:
            wanted = ("linux", ARCHITECTURES.get(platform.machine(), platform.machine()))
            places = [entry.get("platform", {}) for entry in manifest["manifests"]]
            found = [
                entry["digest"]
                for entry, place in zip(manifest["manifests"], places, strict=True)
                if (place.get("os"), place.get("architecture")) == wanted
            ]
            if not found:
                raise SandboxError(f"the registry has no {name} for {'/'.join(wanted)}")
            manifest = self._read_manifest(found[0])
        self.config: dict[str, Any] = json.loads(b"".join(self._registry.pull_blob(manifest["config"]["digest"])))
        self.layers = [str(layer["digest"]) for layer in manifest["layers"]]
        """Digests, the lowest layer first."""

    def download(self, layer: str, file: BinaryIO) -> None:
        """Write a layer to a file, checked against its digest."""
        for chunk in self._registry.pull_blob(layer, chunk_size=CHUNK_BYTES):
            if self._is_stopped():
                raise SandboxError("given up, as another one failed")
            file.write(chunk)

    def _read_manifest(self, reference: str) -> Any:
        text = self._registry.get_manifest_and_response(reference)[0]
        found = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        if reference.startswith("sha256:") and found != reference:
            raise SandboxError(f"the registry gave a manifest {found} in place of {reference}")
        return json.loads(text)
