"""Serve the model to agents over HTTP, and bound what an agent's requests and connections may cost."""

from polar_trl.proxy.server import Proxy

__all__ = ["Proxy"]
