"""Serve a registry of container images on this machine's loopback: one small layer per image.

Can be told to fail, wait and hang. Knows no uploads, no logins and no other image than those it was told of.
"""

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
JSON = "application/json"
WAIT_S = 60.0


class Registry:
    """Served from `with` on.

    Args:
        failures: How many requests for an image's manifest are answered 500 before it is given.
        stalls: Whether layers stop half-way, until the client goes away or the registry is closed.
    """

    def __init__(self, *, failures: int = 0, stalls: bool = False) -> None:
        self.failures = failures
        self.stalls = stalls
        self.asked: Counter[str] = Counter()
        """Image -> requests for its manifest by tag."""
        self.missing: set[str] = set()
        """Images that it does not have."""
        self.waiting: set[str] = set()
        """Images whose manifest is asked for while the gate is shut."""
        self.most_waiting = 0
        self.stalled = threading.Semaphore(0)
        """Released at each layer that stops half-way."""
        self.gate = threading.Event()
        """Manifests are given while it is set."""
        self.gate.set()
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"registry": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="registry")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Registry":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._closed.set()
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def name(self, image: str) -> str:
        return f"{self.address}/{image}:1"

    def wait_until_closed(self) -> None:
        self._closed.wait(WAIT_S)


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if len(parts) < 4:
            self._answer(200, b"{}", JSON)
            return
        image, kind = parts[1], parts[2]
        blobs = build_image(image)
        if kind == "manifests":
            if not parts[3].startswith("sha256:"):
                self.registry.asked[image] += 1
            self._wait(image)
            if image in self.registry.missing:
                self._answer(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "none"}]}', JSON)
            elif self.registry.failures > 0:
                self.registry.failures -= 1
                self._answer(500, b'{"errors": [{"code": "UNKNOWN", "message": "not today"}]}', JSON)
            else:
                self._answer(200, blobs["manifest"], MANIFEST)
        elif content := blobs.get(parts[3]):
            self._answer(200, content, "application/octet-stream", half=self.registry.stalls)
        else:
            self._answer(404, b"{}", JSON)

    def log_message(self, *words: Any) -> None:
        pass

    def _wait(self, image: str) -> None:
        registry = self.registry
        registry.waiting.add(image)
        registry.most_waiting = max(registry.most_waiting, len(registry.waiting))
        registry.gate.wait(WAIT_S)
        registry.waiting.discard(image)

    def _answer(self, status: int, body: bytes, kind: str, *, half: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if kind == MANIFEST:
            self.send_header("Docker-Content-Digest", _digest(body))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.wfile.flush()
            self.registry.stalled.release()
            self.registry.wait_until_closed()
            self.close_connection = True


def build_image(name: str) -> dict[str, bytes]:
    """Build an image of one file, /srv/NAME/file: blobs by digest, and "manifest" (Docker's, version 2, schema 2)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        member = tarfile.TarInfo(f"srv/{name}/file")
        member.size = len(name)
        tar.addfile(member, io.BytesIO(name.encode()))
    layer = gzip.compress(raw.getvalue(), mtime=0)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(raw.getvalue())]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _describe(config, "application/vnd.docker.container.image.v1+json"),
            "layers": [_describe(layer, "application/vnd.docker.image.rootfs.diff.tar.gzip")],
        }
    ).encode()
    return {"manifest": manifest, _digest(config): config, _digest(layer): layer, _digest(manifest): manifest}


def _describe(blob: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "size": len(blob), "digest": _digest(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
