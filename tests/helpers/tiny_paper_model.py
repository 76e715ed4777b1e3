"""Build a tiny checkpoint of Qwen3.5's published class, of whose noise agents can make something.

All parts of the published checkpoints (`scripts/gpu/tiny_hybrid.py`: gated delta nets, a vision tower, a processor),
with the tokenizer, the template and the leaning towards markup of `tiny_qwen`. Unlike in the published 4B model, the
LM head is not tied to the embeddings: the leaning is in the head.
"""

import sys
from pathlib import Path

import torch
from tiny_hybrid import build_tiny_hybrid
from tiny_qwen import build_tiny_qwen35, lean
from transformers import AutoConfig, AutoTokenizer, Qwen3_5ForConditionalGeneration


def build_tiny_paper_model(smollm2: Path, folder: Path) -> Path:
    """Write config, weights, tokenizer and processor files to `folder`, in float32; about 27 MB."""
    text = build_tiny_qwen35(smollm2, folder.with_name(f"{folder.name}-text"))
    build_tiny_hybrid(text, folder, hidden_size=64, num_layers=2, head_dim=64, delta_head_dim=64)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    config.text_config.max_position_embeddings = 1 << 17  # room for the longest prompts
    config.dtype = config.text_config.dtype = torch.float32
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():
        lean(model, AutoTokenizer.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(build_tiny_paper_model(Path(sys.argv[1]), Path(sys.argv[2])))
