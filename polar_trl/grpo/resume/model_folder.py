"""Find the model that a name stands for, as one that the engine can load: a folder, a hub name, a merged adapter.

A full model, one on the hub and a run's `checkpoint-N` are taken as they are. An adapter is merged once onto the model
that it was trained on. Folders that hold no model, half of one, or one without tokenizer are refused (`ConfigError`)
in one sentence.
"""

import hashlib
import json
import logging
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from polar_trl.configs import find_packaged
from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.model_card import CARD_FILE, build_merged_card
from polar_trl.grpo.multimodal import load_processing_class
from polar_trl.grpo.resume.checkpoint import PART_FILE, STATE_FILE, list_checkpoints

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
MERGED_FILE = "polar_merged.json"
"""File in a merged model's folder that names its origin. Only a folder that has it is ever replaced."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SETTINGS = (*_TOKENIZER, "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json")
"""Files of a model that decide what is sampled, besides its weights."""
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A model that was found to be there. Nothing of it is loaded yet."""

    name: str
    """As it was given."""
    identity: str
    """Its name, and a digest of the weights of a folder: equal for the same model, wherever it lies."""
    base: str | None = None
    """Of an adapter: the model that it belongs to."""


def find_model(name: str | None, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find the checkpoint of a name. Raises `ConfigError` that says what is wrong and what to do."""
    name = require_name(name)
    folder = Path(name)
    if folder.is_file():
        raise ConfigError(f"model_name_or_path {name!r} is a file; name the folder that it is in")
    if not folder.is_dir():
        load_config(name, trust_remote_code=trust_remote_code)
        return Checkpoint(name=name, identity=name)
    if (folder / PART_FILE).exists() and not (folder / STATE_FILE).exists():
        raise ConfigError(f"model_name_or_path {name!r} was not written to its end; name an older checkpoint")
    if (folder / ADAPTER_CONFIG).exists():
        return _find_adapter(folder, trust_remote_code=trust_remote_code)
    _require_whole(folder, trust_remote_code=trust_remote_code)
    settings = [folder / name for name in _SETTINGS if (folder / name).exists()]
    return Checkpoint(name=name, identity=f"{folder.resolve().name} {_digest([*_list_weights(folder), *settings])}")


def require_name(name: str | None) -> str:
    """Return the name, or the folder of a model that the package makes. Raises `ConfigError` where none is given."""
    if not name:
        raise ConfigError("model_name_or_path is needed: a model folder, a run's checkpoint-N, or a hub name")
    return find_packaged(name)


def load_config(name: str | None, *, trust_remote_code: bool = False) -> Any:
    """Load transformers' configuration of a folder or hub name. Raises `ConfigError`."""
    name = require_name(name)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ConfigError(
                f"the model {name!r} brings code of its own: read it, and if you trust it set trust_remote_code: true"
            ) from error
        reason = str(error).strip().splitlines()[0]
        hint = "give a folder with config.json and weights, or a hub name that this machine can reach"
        if not _HUB_NAME.fullmatch(name):
            hint = "no such folder; " + hint
        raise ConfigError(f"no model at {name!r}: {hint} ({reason})") from error


def merge_adapter(checkpoint: Checkpoint, folder: Path, *, trust_remote_code: bool = False) -> Path:
    """Write base plus adapter to `folder`, with tokenizer and card, unless they are there already; returns the folder.

    Merged in float32 and saved in the base's own dtype, on the CPU: 4 bytes per weight of host memory.
    """
    assert checkpoint.base is not None
    origin = json.dumps({"adapter": checkpoint.identity}) + "\n"  # no path: the folder may be published
    part = folder.with_name(folder.name + ".part")
    for path in (folder, part):
        if path.is_symlink() or (path.exists() and not (path / MERGED_FILE).exists()):
            raise ConfigError(f"{path} is not an adapter merged earlier; move it away, or name another output_dir")
    if folder.exists() and (folder / MERGED_FILE).read_text(encoding="utf-8", errors="replace") == origin:
        return folder
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError("an adapter needs the package peft: pip install 'polar-trl[peft]'") from error
    from trl.trainer.utils import create_model_from_path

    adapter = Path(checkpoint.name)
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    dtype = load_config(checkpoint.base, **trust).get_text_config().dtype or torch.float32
    model = create_model_from_path(checkpoint.base, dtype=torch.float32, device_map=None, **trust)
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"the adapter {adapter} does not fit its base {checkpoint.base}: {reason}") from error
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / MERGED_FILE).write_text(origin, encoding="utf-8")  # first: what a kill leaves is known for ours
    merged.to(dtype).save_pretrained(part)
    has_tokenizer = any((adapter / name).exists() for name in _TOKENIZER)
    load_processing_class(str(adapter) if has_tokenizer else checkpoint.base, **trust).save_pretrained(part)
    text = adapter / CARD_FILE
    if text.exists() and (card := build_merged_card(text.read_text(encoding="utf-8", errors="replace"))):
        (part / CARD_FILE).write_text(card, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)  # an earlier merge, as was asked above
    part.rename(folder)
    return folder


def _find_adapter(folder: Path, *, trust_remote_code: bool) -> Checkpoint:
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / ADAPTER_CONFIG} names no base_model_name_or_path ({error!r})") from error
    weights = [folder / name for name in _ADAPTER_WEIGHTS if (folder / name).exists()]
    if not weights:
        raise ConfigError(f"model_name_or_path {str(folder)!r} is an adapter without {_ADAPTER_WEIGHTS[0]}")
    for path in weights:
        _require_whole_file(path)
    try:
        found = find_model(base, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"{folder} is an adapter of {base!r}, which cannot be found: {error}") from error
    if found.base is not None:
        raise ConfigError(f"{folder} is an adapter of {base!r}, which is an adapter itself; merge that one first")
    return Checkpoint(
        name=str(folder), identity=f"{folder.resolve().name} {_digest(weights)} on {found.identity}", base=base
    )


def _require_whole(folder: Path, *, trust_remote_code: bool) -> None:
    """Require a full model, with every file of its weights and a tokenizer. Raises `ConfigError`."""
    name = f"model_name_or_path {str(folder)!r}"
    if not (folder / "config.json").exists():
        if steps := list_checkpoints(folder):
            raise ConfigError(f"{name} is a run's folder without a final model; name {steps[-1][1]}")
        raise ConfigError(f"{name} holds no model: neither config.json nor {ADAPTER_CONFIG}")
    load_config(str(folder), trust_remote_code=trust_remote_code)
    weights = _list_weights(folder)
    shards = [path for index in sorted(folder.glob("*.index.json")) for path in _list_shards(index)]
    missing = [path.name for path in shards if not path.exists()]
    if missing or not weights:
        lacking = missing[0] if missing else "weights (model*.safetensors)"
        hint = "; sharded checkpoints of FSDP or DeepSpeed have to be saved whole" if not weights else ""
        raise ConfigError(f"{name} lacks {lacking}{hint}")
    for path in {*weights, *shards}:
        _require_whole_file(path)
    if not any((folder / file).exists() for file in _TOKENIZER):
        raise ConfigError(f"{name} has no tokenizer; copy the tokenizer's files of its base model there")


def _require_whole_file(path: Path) -> None:
    """Require a file of weights to be complete: header and length of safetensors, the end of torch's archives."""
    if path.suffix != ".safetensors":
        with path.open("rb") as file:
            start = file.read(2)
        if not start or (start == b"PK" and not zipfile.is_zipfile(path)):
            raise ConfigError(f"{path} is not whole; copy it again, or name another checkpoint")
        return
    try:
        with safe_open(str(path), framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not whole: {error}; copy it again, or name another checkpoint") from error


def _list_shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights ({error!r}); copy it again") from error
    return [index.parent / str(name) for name in sorted(names)]


def _list_weights(folder: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _digest(files: list[Path]) -> str:
    """Hash samples spread over the files: training changes weights everywhere, and a whole read takes minutes."""
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:16]
