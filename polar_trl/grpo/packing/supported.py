"""Find what keeps a model's rows from being forwarded in one flat sequence, if anything does.

Nothing is guessed: a layer of an unknown kind counts as one that looks across rows.
"""

import inspect
from typing import Any

from torch import nn

from polar_trl.grpo.packing.linear_attention import is_gated_delta_net

_LAYER_TYPES = frozenset({"full_attention", "linear_attention"})
_SETTINGS = {
    "is_encoder_decoder": "an encoder",
    "sliding_window": "attention with a sliding window",
    "attention_chunk_size": "chunked attention",
    "attn_logit_softcapping": "soft-capped attention scores",
    "use_bidirectional_attention": "bidirectional attention",
    "alibi": "positions as attention biases (ALiBi)",
}
"""Settings of a model's config that, if set, change which tokens attend to which or how, and their meaning."""
_TOKENWISE = ("norm", "mlp", "feed_forward", "moe", "dropout")
"""Parts of names of a layer's modules that treat each token alone."""
_IN_ATTENTION = ("Linear", "Norm", "Rotary", "Dropout")
"""Parts of names of the classes that plain attention is made of, LoRA's among them."""


def find_causal_model(model: Any) -> Any:
    """Return the language model inside of PEFT's wrapper, if it is in one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_unsupported(model: nn.Module) -> str | None:
    """Name the first thing that keeps a causal language model from being forwarded over a `Layout`, or None.

    Known are full causal attention through transformers' attention interface and gated delta nets. All else
    is named, also what might work, since a layer that sees across rows would train on wrong gradients in silence.

    Returns:
        Half a sentence: "it has chunked attention (attention_chunk_size=8192)".
    """
    base = find_causal_model(model)
    config = base.config.get_text_config()
    for name, meaning in _SETTINGS.items():
        value = getattr(config, name, None)
        if value:
            return f"it has {meaning} ({name}={value})"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        return f"it has layers of the types {', '.join(other)}"
    layers = getattr(base.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return f"{type(base).__name__} has no list of decoder layers under a known name"
    for index, layer in enumerate(layers):
        if problem := _find_in_layer(layer):
            return f"its layer {index} has {problem}"
    return None


def _find_in_layer(layer: nn.Module) -> str | None:
    num_mixers = 0
    for name, module in layer.named_children():
        if is_gated_delta_net(module):
            num_mixers += 1
        elif getattr(module, "is_causal", False) is True:
            num_mixers += 1
            if problem := _find_in_attention(module):
                return f"{name}, {problem}"
        elif not any(part in name.lower() for part in _TOKENWISE) or any(
            "conv" in type(part).__name__.lower() for part in module.modules()
        ):
            return f"{name}, a {type(module).__name__}, which is not known to treat each token alone"
    if num_mixers != 1:
        return f"{num_mixers} modules that mix tokens, not one"
    return None


def _find_in_attention(module: nn.Module) -> str | None:
    kind = f"a {type(module).__name__}"
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__code__.co_names:
        return f"{kind} that does not use transformers' attention interface"
    if getattr(module, "sliding_window", None):
        return f"{kind} with a sliding window"
    if parameters := [name for name, _ in module.named_parameters(recurse=False)]:
        return f"{kind} with parameters of its own ({', '.join(parameters)}), as attention sinks are"
    for name, child in module.named_children():
        if not any(part in type(child).__name__ for part in _IN_ATTENTION):
            return f"{kind} with {name}, a {type(child).__name__}"
    return None
