"""Build a tiny Qwen3.5 and a tiny Qwen3 of random weights: SmolLM2's vocabulary, Qwen's markup and templates.

Its text is noise. It leans towards the tokens of markup only, so that reasoning, turns and tool calls end now and then
as a model's do: agents then get answers, cut answers and text with tags in it. It never names a tool, but where it is
asked to: then agents get calls of a tool that they do not have.
"""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

LEANING: Mapping[str, float] = {"</think>": 0.2, "<tool_call>": 0.2, "</tool_call>": 0.15, "<|im_end|>": 0.05}
"""Token of markup -> about how often it is sampled at temperature 1. All other tokens share the rest."""
CALLING: Mapping[str, float] = {**LEANING, "<function=look>": 0.25}
"""The same, where a call names a tool."""

_MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_HIDDEN_SIZE = 64


def build_tiny_qwen35(smollm2: Path, folder: Path, *, leaning: Mapping[str, float] = LEANING) -> Path:
    """Write config, weights and tokenizer to `folder`; about 13 MB. `smollm2` is where the vocabulary comes from."""
    tokenizer = _build_tokenizer(smollm2, "qwen3_5_think")
    tokenizer.add_tokens([token for token in leaning if token not in LEANING], special_tokens=False)
    config = Qwen3_5TextConfig(
        **_build_sizes(tokenizer),
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=1 << 17,
    )
    return _write(Qwen3_5ForCausalLM, config, tokenizer, folder, torch.bfloat16, leaning)


def build_tiny_qwen3(smollm2: Path, folder: Path) -> Path:
    """The same for Qwen3, which has attention only; in float32, about 13 MB."""
    tokenizer = _build_tokenizer(smollm2, "qwen3")
    config = Qwen3Config(**_build_sizes(tokenizer), max_position_embeddings=1 << 15)
    return _write(Qwen3ForCausalLM, config, tokenizer, folder, torch.float32)


def _build_sizes(tokenizer: Any) -> dict[str, Any]:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _write(
    model_class: Any,
    config: Any,
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype,
    leaning: Mapping[str, float] = LEANING,
) -> Path:
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        lean(model, tokenizer, leaning)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _build_tokenizer(smollm2: Path, template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(list(_MARKUP), special_tokens=False)
    tokenizer.unk_token = None  # here "<|endoftext|>", which Qwen's formats know as a token of its own
    tokenizer.chat_template = _read_trl_template(template)
    return tokenizer


def lean(model: Any, tokenizer: Any, leaning: Mapping[str, float] = LEANING) -> None:
    """Give every hidden state a constant first element, and let the tokens of `leaning` read their logit from it."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(std=1.0)
    embedding[:, 0] = math.sqrt(_HIDDEN_SIZE)
    head.normal_(std=0.1)
    head[:, 0] = 0.0
    # the final norm leaves half of the length to the constant and half to all else
    constant = math.sqrt(_HIDDEN_SIZE / 2)
    others = len(tokenizer) * math.exp(0.1**2 * _HIDDEN_SIZE / 2 / 2)
    rest = 1.0 - sum(leaning.values())
    for token, share in leaning.items():
        row = head[tokenizer.convert_tokens_to_ids(token)]
        row.zero_()
        row[0] = math.log(share / rest * others) / constant


def _read_trl_template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
