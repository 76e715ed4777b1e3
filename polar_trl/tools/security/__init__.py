"""Attack the sandboxes of this machine, and look from outside at what holds."""

from polar_trl.tools.security.check import Row, check_security

__all__ = ["Row", "check_security"]
