"""Build models of real sizes in which every word is followed by one certain other word, for throughput.py."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_sizes import QWEN3_06B, QWEN3_4B, SMOLLM2_135M, build_sizes

from polar_trl.errors import ConfigError

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"class": LLAMA, "sizes": build_sizes(2, 64, 128, 2, 1, 32), "calls": (4, 3, 3), "scale": 0.02},
    "135m": {"class": LLAMA, "sizes": SMOLLM2_135M, "calls": (16, 14, 6), "scale": 1.0},
    "0.6b": {"class": QWEN3, "sizes": QWEN3_06B, "calls": (12, 10, 3), "scale": 0.5},
    "4b": {"class": QWEN3, "sizes": QWEN3_4B, "calls": (6, 6, 3), "scale": 0.4},
}
"""Sizes, with the vocabulary of the tokenizer that is given. `calls` a
session begins on average at 8, 64 and 256 sessions and the factor of lengths: what an H100 does in half a minute."""
MAX_MODEL_LEN = 32768
NUM_WORDS = 4096


def write_model(folder: Path, name: str, tokenizer_folder: Path, vocab_size: int) -> None:
    """Write a configuration of the model's sizes and the tokenizer's files; weights come from `chain_words`."""
    kind = MODELS[name]["class"]
    config = {
        "architectures": [kind],
        "model_type": "llama" if kind == LLAMA else "qwen3",
        "vocab_size": vocab_size,
        **MODELS[name]["sizes"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        # so that the last layer can be other than the embedding
        "tie_word_embeddings": False,
        "dtype": "float32" if name == "tiny" else "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in tokenizer_folder.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")):
            shutil.copy(path, folder)


def find_words(tokenizer: Any) -> dict[str, int]:
    """Find words that are one token in the midst of a text, with that token.

    Raises:
        ConfigError: The tokenizer has fewer than `NUM_WORDS`.
    """
    words = {}
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id])
        word = text[1:]
        if not (text[:1] == " " and len(word) > 2 and word.isascii() and word.isalpha()):
            continue
        if tokenizer.encode(text, add_special_tokens=False) == [token_id]:
            words[word] = token_id
        if len(words) == NUM_WORDS:
            return words
    raise ConfigError(f"--tokenizer: it has {len(words)} words of one token, and {NUM_WORDS} are needed")


def chain_words(llm: Any, word_ids: Sequence[int], vocab_size: int, hidden: int) -> None:
    """Load weights with which each token is followed by one certain word.

    The random layers are of no account beside the embedding E. With the last layer W[word i+1] = 8 E[word i] the
    logit of the word after word i is 8 E[i]·E[i] / rms(E[i]), about 8 times the hidden size; others are far below.
    Tokens that are no words have the embedding of one.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab_size, hidden, generator=generator)
    words = torch.tensor(word_ids)
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[words] = False
    other_ids = others.nonzero()[:, 0]
    embedding[other_ids] = embedding[words[other_ids * 7919 % len(words)]]
    last_layer = torch.zeros(vocab_size, hidden)
    last_layer[words.roll(-1)] = 8 * embedding[words]
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": last_layer,
    }
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    parameter = next(model.parameters())
    with torch.no_grad():
        model.load_weights([(name, weight.to(parameter)) for name, weight in weights.items()])
