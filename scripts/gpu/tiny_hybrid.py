"""Build a tiny checkpoint of Qwen3.5's published class, with random weights and SmolLM2's tokenizer.

All parts of the published checkpoints are there: gated delta nets and full attention with a gate, rotary positions in
three dimensions, a vision tower, tied embeddings, and the files of a processor. Its text is noise, close to uniform
over the vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

_VISION_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen3VLProcessor"}
_PREPROCESSORS = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 100352},
    },
    "video_preprocessor_config.json": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 100352},
    },
}


def build_tiny_hybrid(
    tokenizer_folder: Path,
    folder: Path,
    *,
    hidden_size: int = 256,
    num_layers: int = 4,
    head_dim: int = 128,
    delta_head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    **text: Any,
) -> Path:
    """Write config, weights, tokenizer and processor files to `folder`.

    Args:
        tokenizer_folder: A model's folder whose tokenizer and chat template are taken.
        num_layers: The last of every four has full attention; of fewer, the last.
        head_dim: Of full attention, 256 in the published models; a multiple of 16.
        delta_head_dim: Of keys and values of the delta nets, 128 in the published models.
        text: Keys of `Qwen3_5TextConfig` that shall be others. A `vocab_size` above the tokenizer's is filled with
            tokens that no text is encoded to, so that each sampled one can be decoded.
    """
    tokenizer = write_processor(tokenizer_folder, folder)
    torch.manual_seed(0)
    config = _build_config(tokenizer, hidden_size, num_layers, head_dim, delta_head_dim, text)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen3_5ForConditionalGeneration(config).to(dtype).save_pretrained(folder)
    if "vocab_size" in text:
        _fill_vocabulary(folder / "tokenizer.json", range(len(tokenizer), text["vocab_size"]))
    return folder


def write_processor(tokenizer_folder: Path, folder: Path) -> Any:
    """Write the files of a processor, and return its tokenizer, which has tokens for images."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_VISION_TOKENS.values())})
    tokenizer.save_pretrained(folder)
    for name, settings in _PREPROCESSORS.items():
        (folder / name).write_text(json.dumps({**_PATCHES, **settings}, indent=1))
    return tokenizer


def find_vision_ids(tokenizer: Any) -> dict[str, int]:
    """Find the ids that a configuration names, of tokens that stand for images."""
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in _VISION_TOKENS.items()}


def _fill_vocabulary(path: Path, ids: range) -> None:
    content = json.loads(path.read_text())
    content["model"]["vocab"].update({f"\u0120unused{number}": number for number in ids})
    path.write_text(json.dumps(content))


def _build_config(
    tokenizer: Any, hidden_size: int, num_layers: int, head_dim: int, delta_head_dim: int, others: dict[str, Any]
) -> Any:
    end = tokenizer.eos_token_id
    pairs = head_dim // 8  # the first quarter of a head is rotated, in pairs
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,  # more than there are tokens, as in the published models
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "full_attention_interval": min(4, num_layers),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": delta_head_dim,
        "linear_value_head_dim": delta_head_dim,
        "max_position_embeddings": 1 << 15,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],  # time, height, width
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": end,
        **others,
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "num_position_embeddings": 256,
    }
    ids = find_vision_ids(tokenizer)
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
