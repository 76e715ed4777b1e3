"""Check what a run file passes on to `vllm.LLM` (`engine_kwargs`): what keeps samples exact, and nothing else.

Keys and values in FP8 are the engine's own approximation: the log-probabilities that it records are those of what it
sampled from, and its gap to the trainer grows. Drafts change neither: each draft token is accepted with the
probability that the target model gives it, and recorded with that (Leviathan et al., 2023).
"""

from collections.abc import Mapping
from typing import Any

from polar_trl.errors import ConfigError

_KNOWN = ("kv_cache_dtype", "kv_cache_memory_bytes", "speculative_config")
_REFUSED = {
    "kv_offloading_size": (
        "copies of the cache in host memory end the engine at the step after a call was aborted (vLLM 0.26), and "
        "agents abort calls. Sessions that the cache has no room for wait at the gate instead"
    )
}
_NO_DRAFT_MODEL = (
    "no push reaches the weights of a draft model or of a model's own MTP head, and sleep drops them; drafts that "
    "need no weights are {'method': 'ngram', 'num_speculative_tokens': 4, 'prompt_lookup_max': 4}"
)


def check_engine_kwargs(given: Any) -> None:
    """Refuse what cannot be passed on.

    Args:
        given: Of the setting `engine_kwargs`.

    Raises:
        ConfigError: an argument is unknown here, or would not be exact or not work.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"engine_kwargs must be a mapping of arguments for vllm.LLM (it is {given!r})")
    for name, value in given.items():
        if name in _REFUSED:
            raise ConfigError(f"engine_kwargs: {name} is not passed on: {_REFUSED[name]}")
        if name not in _KNOWN:
            raise ConfigError(f"engine_kwargs: {name!r} is not passed on to vLLM, only {', '.join(_KNOWN)} are")
        if name == "speculative_config":
            _check_drafts(value)
        elif name == "kv_cache_dtype":
            if not isinstance(value, str):
                raise ConfigError(f"engine_kwargs: kv_cache_dtype must be a name, such as 'fp8' (it is {value!r})")
        elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"engine_kwargs: {name} must be a whole number above 0 (it is {value!r})")


def _check_drafts(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"engine_kwargs: speculative_config must be a mapping (it is {value!r})")
    if value.get("method") != "ngram" or "model" in value:
        method = value.get("model", value.get("method"))
        raise ConfigError(
            f"engine_kwargs: speculative_config must have method 'ngram', not {method!r}: {_NO_DRAFT_MODEL}"
        )
    count = value.get("num_speculative_tokens")
    if not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"engine_kwargs: speculative_config: num_speculative_tokens must be at least 1 (it is {count!r})"
        )
