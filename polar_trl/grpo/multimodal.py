"""Train the text part of a multimodal checkpoint, such as Qwen3.5's published class.

Agents exchange text, so no gradient reaches the parts that read images, video or sound: they are kept as they are,
neither trained nor adapted, and saved with the rest. A model without such parts is left alone. Parts are
not found by name: one counts as unreached where none of its weights is in the decoder, the embeddings or the LM head.
"""

import logging
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoProcessor, AutoTokenizer

from polar_trl.grpo.meta_model import build_meta_model
from polar_trl.grpo.packing.supported import find_causal_model

logger = logging.getLogger(__name__)


def is_multimodal(config: Any) -> bool:
    """Return whether a model's text settings are only a part of its configuration."""
    return config.get_text_config() is not config


def load_processing_class(name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the processor of a multimodal checkpoint, which is saved with the model, or else its tokenizer.

    A processor needs torchvision, which text does not.
    """
    # as TRL loads them
    options: dict[str, Any] = {
        "truncation_side": "left", "padding_side": "left", "trust_remote_code": trust_remote_code
    }  # fmt: skip
    try:
        return AutoProcessor.from_pretrained(name_or_path, **options)
    except ImportError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "").split(". ")[0]
        logger.warning(
            "the processor of %s does not load; its tokenizer does for text, and saved models have no image "
            "processor's settings (%s)",
            name_or_path,
            reason,
        )
        return AutoTokenizer.from_pretrained(name_or_path, **options)


def find_unreached(model: Any) -> list[str]:
    """Find the topmost modules of a multimodal model whose weights text never meets; none of another model."""
    base = find_causal_model(model)
    if not is_multimodal(base.config):
        return []
    return _list_unreached(base, _reached_weights(base), "")


def freeze_unreached(model: Any) -> int:
    """Take what text never meets out of training. A new adapter's own weights are where they belong already.

    Returns:
        How many weights were trainable before, and are not any more.
    """
    base = find_causal_model(model)
    if not is_multimodal(base.config):
        return 0
    reached = _reached_weights(base)
    frozen = [weight for weight in base.parameters() if weight.requires_grad and id(weight) not in reached]
    for weight in frozen:
        weight.requires_grad_(False)
    count = sum(weight.numel() for weight in frozen)
    if count:
        names = ", ".join(_list_unreached(base, reached, ""))
        logger.warning("%s: %.3g weights that no text reaches are not trained", names, count)
    return count


def exclude_unreached(peft_config: Any, config: Any) -> None:
    """Keep an adapter (changed in place) out of the parts that text never meets, should its targets be in there too.

    Args:
        peft_config: Of PEFT; "all-linear" is what targets all parts.
        config: The model's.
    """
    if peft_config is None or not is_multimodal(config) or not hasattr(peft_config, "exclude_modules"):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    # of weights without data: which modules an adapter gets, PEFT says itself
    adapted = build_meta_model(config, dtype=torch.float32, peft_config=peft_config).get_base_model()
    unreached = [
        name
        for name in find_unreached(adapted)
        if any(isinstance(module, BaseTunerLayer) for module in adapted.get_submodule(name).modules())
    ]
    if not unreached:
        return
    patterns = [rf"{re.escape(name)}(\..*)?" for name in unreached]
    theirs = peft_config.exclude_modules
    if isinstance(theirs, str):
        patterns.append(theirs)
    elif theirs:  # PEFT: whole names, or their ends
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in theirs]
    peft_config.exclude_modules = "|".join(f"({pattern})" for pattern in patterns)
    logger.warning("the adapter leaves out %s, which no text reaches", ", ".join(unreached))


def _reached_weights(base: Any) -> set[int]:
    parts = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
    return {id(weight) for part in parts if part is not None for weight in part.parameters()}


def _list_unreached(module: nn.Module, reached: set[int], prefix: str) -> list[str]:
    names = []
    for name, child in module.named_children():
        weights = {id(weight) for weight in child.parameters()}
        if weights and weights.isdisjoint(reached):
            names.append(prefix + name)
        elif not weights <= reached:
            names += _list_unreached(child, reached, f"{prefix}{name}.")
    return names


def prepare_multimodal(model: Any, config: Any, args: Any, peft_config: Any, processing_class: Any) -> Any:
    """Keep adapters and gradients out of the parts of a multimodal model that text never meets.

    Returns:
        The processing class, loaded if a multimodal checkpoint needs another than TRL would load.
    """
    if not is_multimodal(config):
        return processing_class
    exclude_unreached(peft_config, config)
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = False  # TRL turns it on for vision towers; here they are not trained
    if processing_class is None and isinstance(model, str):
        return load_processing_class(model, trust_remote_code=args.trust_remote_code)
    return processing_class
