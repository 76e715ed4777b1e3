"""Sandboxes that bubblewrap makes: no engine, no images."""

from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend

__all__ = ["BwrapSandboxBackend"]
