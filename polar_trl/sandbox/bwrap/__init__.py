"""Sandboxes of bubblewrap, without an engine and without images."""

from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend

__all__ = ["BwrapSandboxBackend"]
