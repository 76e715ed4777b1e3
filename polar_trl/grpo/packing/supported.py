"""Find what keeps a model's rows from being forwarded in one flat sequence, if anything does.

Nothing is guessed: a layer of an unknown kind counts as one that looks across rows.
"""

import inspect
from typing import Any

from torch import nn

from polar_trl.grpo.packing.linear_attention import is_gated_delta_net

_LAYER_TYPES = frozenset({"full_attention", "linear_attention", "sliding_attention"})
_SETTINGS = {
    "is_encoder_decoder": "an encoder",
    "attention_chunk_size": "chunked attention",
    "use_bidirectional_attention": "bidirectional attention",
    "alibi": "positions as attention biases (ALiBi)",
}
"""Settings of a model's config that, if set, change which tokens attend to which or how, and their meaning."""
_VARYING_ROTARY = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the longest row of a forward pass."""
_WINDOW_MASK = "create_sliding_window_causal_mask"
"""transformers' function by which a decoder gives its eager attention a sliding window."""
_TOKENWISE = ("norm", "mlp", "feed_forward", "moe", "dropout")
"""Parts of names of a layer's modules that treat each token alone."""
_IN_ATTENTION = ("Linear", "Norm", "Rotary", "Dropout")
"""Parts of names of the classes that plain attention is made of, LoRA's among them."""


def find_causal_model(model: Any) -> Any:
    """Return the language model inside of PEFT's wrapper, if it is in one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_unsupported(model: nn.Module) -> str | None:
    """Name the first thing that keeps a causal language model from being forwarded over a `Layout`, or None.

    Known are causal attention through transformers' attention interface, with sliding windows, soft caps and sinks if
    it passes those on, and gated delta nets. All else
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
    layer_types = getattr(config, "layer_types", None) or ()
    if other := sorted(set(layer_types) - _LAYER_TYPES):
        return f"it has layers of the types {', '.join(other)}"
    rotary = getattr(config, "rope_parameters", None) or {}
    for parameters in (rotary, *rotary.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in _VARYING_ROTARY:
            return f"its rotary frequencies depend on the longest row (rope_type={parameters['rope_type']})"
    decoder = base.get_decoder()
    has_windows = "sliding_attention" in layer_types or (not layer_types and getattr(config, "sliding_window", None))
    if has_windows and _WINDOW_MASK not in inspect.unwrap(type(decoder).forward).__code__.co_names:
        return f"it has a sliding window ({config.sliding_window}) that its masks do not have"
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return f"{type(base).__name__} has no list of decoder layers under a known name"
    for index, layer in enumerate(layers):
        kind = layer_types[index] if index < len(layer_types) else None
        if problem := _find_in_layer(layer, config, kind):
            return f"its layer {index} has {problem}"
    return None


def _find_in_layer(layer: nn.Module, config: Any, kind: str | None) -> str | None:
    num_mixers = 0
    for name, module in layer.named_children():
        if is_gated_delta_net(module):
            num_mixers += 1
        elif getattr(module, "is_causal", False) is True:
            num_mixers += 1
            if problem := _find_in_attention(module, config, kind):
                return f"{name}, {problem}"
        elif not any(part in name.lower() for part in _TOKENWISE) or any(
            "conv" in type(part).__name__.lower() for part in module.modules()
        ):
            return f"{name}, a {type(module).__name__}, which is not known to treat each token alone"
    if num_mixers != 1:
        return f"{num_mixers} modules that mix tokens, not one"
    return None


def _find_in_attention(module: nn.Module, config: Any, kind: str | None) -> str | None:
    name = f"a {type(module).__name__}"
    code = inspect.unwrap(type(module).forward).__code__
    if "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return f"{name} that does not use transformers' attention interface"
    # names of keywords are constants of the code, alone or in a tuple
    constants = {
        part for constant in code.co_consts for part in (constant if isinstance(constant, tuple) else [constant])
    }
    window, softcap = (getattr(config, name, None) for name in ("sliding_window", "attn_logit_softcapping"))
    has_window = kind == "sliding_attention" or (kind is None and window)
    if has_window and "sliding_window" not in constants:
        return f"{name} that does not pass on its sliding window of {window}"
    if kind is not None and bool(getattr(module, "sliding_window", None)) != bool(has_window):
        return f"{name} whose sliding_window is not that of its layer's type, {kind}"
    if softcap and "softcap" not in constants:
        return f"{name} that does not pass on its soft cap of {softcap}"
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if parameters and not (parameters == {"sinks"} and "s_aux" in constants):
        return f"{name} with parameters of its own ({', '.join(sorted(parameters))})"
    for child_name, child in module.named_children():
        if not any(part in type(child).__name__ for part in _IN_ATTENTION):
            return f"{name} with {child_name}, a {type(child).__name__}"
    return None
