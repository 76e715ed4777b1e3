"""Merge an adapter into copies of its base weights, one layer at a time, for an engine that serves whole weights.

PEFT's own merging adds the adapter to the base weights in place and subtracts it again, and in half precision each
round leaves its rounding in a base that is meant to be frozen. Here a layer's weights are copied in float32, PEFT
merges into the copies, and the result is rounded once (`engine.rounding`). The policy in the engine is the base and
the adapter, as they are on disk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from polar_trl.errors import ConfigError

Gather = Callable[[list[nn.Parameter]], Any]
"""A context manager in which parameters that DeepSpeed has sharded are whole."""


def iter_merged(model: Any, gather: Gather) -> Iterator[tuple[str, Tensor, bool]]:
    """Iterate over the weights of a PEFT model's base with the active adapter merged in (a collective).

    Yields:
        The name in the base model, the whole weight, and whether the adapter was merged into it, a float32 copy then.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    done: set[str] = set()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".base_layer.")[0]
        if model.prefix in name or "original_module" in name or name in done:
            continue
        if owner not in layers or not layers[owner].active_adapters:
            with gather([parameter]):
                yield _plain_name(name), _whole(parameter.data), False
            continue
        layer = layers[owner]
        with gather(list(layer.parameters())), _merged_copies(layer) as merged:
            for leaf, weight in merged.items():
                full_name = f"{owner}.base_layer.{leaf}"
                done.add(full_name)
                yield _plain_name(full_name), weight, True


def require_mergeable(model: Any) -> None:
    """Raise `ConfigError` where merged weights would not be the policy, or could not be handed to the engine."""
    base = model.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if base.config.get_text_config().tie_word_embeddings and any(
        hasattr(module, "base_layer") or hasattr(module, "modules_to_save") for module in ends
    ):
        raise ConfigError(
            "the model's embedding and head are one weight (tie_word_embeddings), of which an adapter would change "
            "one side only: leave embed_tokens and lm_head out of lora_target_modules and of modules_to_save"
        )
    if any(name.endswith("token_adapter") for name, _ in base.named_modules()):
        raise ConfigError("trainable_token_indices: rows that are trained alone cannot be merged for the engine")
    for name, module in base.named_modules():
        if hasattr(module, "base_layer") and not all(p.is_floating_point() for p in module.base_layer.parameters()):
            raise ConfigError(f"{name} is quantised: an adapter on it cannot be merged for the engine")


@contextmanager
def _merged_copies(layer: Any) -> Iterator[dict[str, Tensor]]:
    """Merge the adapter into float32 copies of the base's own parameters, while the layer keeps what it has."""
    base = layer.get_base_layer()
    kept = [(module, leaf, p) for module in layer.modules() for leaf, p in module._parameters.items() if p is not None]
    for module, leaf, parameter in kept:
        whole = _whole(parameter.data)
        copied = whole.float().clone() if module is base else whole
        module._parameters[leaf] = nn.Parameter(copied, requires_grad=False)
    try:
        layer.merge()
        yield {leaf: p.data for module, leaf, p in kept if module is base for p in [base._parameters[leaf]]}
    finally:
        layer.merged_adapters.clear()
        for module, leaf, parameter in kept:
            module._parameters[leaf] = parameter


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _plain_name(name: str) -> str:
    """Return a parameter's name in the base model's checkpoint."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    for part in ("_checkpoint_wrapped_module.", "modules_to_save.default."):
        name = name.replace(part, "")
    return name
