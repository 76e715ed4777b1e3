"""Sandboxes as containers of a Docker engine."""

from polar_trl.sandbox.docker.backend import DockerSandboxBackend

__all__ = ["DockerSandboxBackend"]
