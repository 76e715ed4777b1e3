"""Sizes of published models, as keys of transformers' configurations: random weights of these cost what theirs do."""

VOCABULARY = {"qwen3": 151936, "qwen3.5": 248320}


def build_sizes(
    layers: int, hidden: int, feed_forward: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, int]:
    """Those of a decoder whose layers are alike."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SMOLLM2_135M = build_sizes(30, 576, 1536, 9, 3, 64)
QWEN3_06B = build_sizes(28, 1024, 3072, 16, 8, 128)
QWEN3_4B = build_sizes(36, 2560, 9728, 32, 8, 128)
QWEN35_4B = build_sizes(32, 2560, 9216, 16, 4, 256)
