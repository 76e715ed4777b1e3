"""Open a checkpoint, or a server's model, behind a proxy: for evaluations, for collecting, and to be served."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from transformers import AutoTokenizer, GenerationConfig

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.standalone import build_standalone_engine
from polar_trl.errors import ConfigError
from polar_trl.eval.served_model import open_served_model
from polar_trl.eval.setup import EvalSetup, name_engine
from polar_trl.eval.solutions import SolutionEngine
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.logs.library_log import LibraryLog
from polar_trl.grpo.resume.model_folder import Checkpoint, merge_adapter
from polar_trl.harness.base import Harness
from polar_trl.proxy import Proxy
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Task


def prepare_model(setup: EvalSetup, checkpoint: Checkpoint) -> str:
    """Return what the engine loads: the checkpoint or its merged copy, or what has the tokenizer if that is all."""
    if checkpoint.base is None or name_engine(setup.evaluation) != "vllm":
        return checkpoint.base or checkpoint.name
    folder = setup.folder / "merged"
    print(f"merging the adapter {checkpoint.name} onto {checkpoint.base}: {folder}", file=sys.stderr, flush=True)
    with LibraryLog(setup.folder).everything():
        return str(merge_adapter(checkpoint, folder, trust_remote_code=setup.args.trust_remote_code))


@contextmanager
def open_engine(setup: EvalSetup, model: str) -> Iterator[Engine]:
    """Open the engine of a model that `prepare_model` gave, or of a server; it is closed after the block.

    What libraries say meanwhile is in `libraries.log` of the folder.
    """
    libraries = LibraryLog(setup.folder)
    # in this order: vLLM's logger is made with the engine
    with _open_engine(setup, model, libraries) as engine, libraries.logged():
        yield engine


@contextmanager
def _open_engine(setup: EvalSetup, model: str, libraries: LibraryLog) -> Iterator[Engine]:
    args, evaluation = setup.args, setup.evaluation
    if evaluation.base_url is not None:
        tokenizer = None if evaluation.text_only or setup.model is None else model
        with open_served_model(
            evaluation.base_url,
            args,
            setup.params,
            model=tokenizer,
            served_name=evaluation.served_name,
            text_only=evaluation.text_only,
        ) as served:
            yield served
        return
    print(f"loading {model}; what libraries print is in {libraries.path}", file=sys.stderr, flush=True)
    with libraries.everything():
        engine = build_standalone_engine(
            model,
            cpu=setup.on_cpu,
            max_model_len=args.vllm_max_model_length,
            max_num_seqs=args.engine_slots,
            gpu_memory_utilization=evaluation.eval_gpu_memory_utilization,
            graphs=args.engine_cuda_graphs,
            dtype=args.engine_dtype,
            dithered=args.weight_rounding == "dithered",
            engine_kwargs=cast(dict[str, Any], args.engine_kwargs or {}),
            trust_remote_code=args.trust_remote_code,
            # another one in each process: samples that are added later must not repeat the earlier ones
            seed=int.from_bytes(os.urandom(4), "big"),
        )
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def open_proxy(
    args: PolarGRPOConfig, engine: Engine, *, model: str, params: GenerationParams, **settings: Any
) -> Iterator[Proxy]:
    """Open a proxy in front of the engine; it ends after the block.

    Args:
        model: Folder or hub name of what the engine samples from: its tokenizer is read.
        params: How to sample; the tokens that end an answer are added.
        settings: Others of `Proxy`.
    """
    renderer, ends = engine.own_renderer, set[int]()
    if renderer is None:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
        renderer = load_run_renderer(args, model, tokenizer)
        ends = {*renderer.stop_token_ids, *find_end_tokens(model, tokenizer)}
    params = replace(params, stop_token_ids=tuple(sorted({*params.stop_token_ids, *ends})))
    with Proxy(engine, renderer, params=params, **settings) as proxy:
        yield proxy


def load_run_renderer(args: PolarGRPOConfig, model: str, tokenizer: Any) -> Renderer:
    """Load the renderer of a run's settings for a folder or hub name."""
    return load_renderer(
        tokenizer, model, family=args.renderer, thinking=args.thinking, template_kwargs=args.chat_template_kwargs
    )


@contextmanager
def open_solutions(setup: EvalSetup, model: str, harness: Harness, tasks: Iterable[Task]) -> Iterator[Engine]:
    """Open an engine that plays the tasks' solutions; of the model only the tokenizer is read.

    Raises `ConfigError` as `SolutionEngine` does, and where no setting says how long a context may be.
    """
    if setup.args.vllm_max_model_length is None:
        raise ConfigError("solutions loads no model that says how long a context may be; give vllm_max_model_length")
    with LibraryLog(setup.folder).everything():
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=setup.args.trust_remote_code)
        renderer = load_run_renderer(setup.args, model, tokenizer)
    yield SolutionEngine(tasks, harness, renderer, max_model_len=setup.args.vllm_max_model_length)


def find_end_tokens(model: str, tokenizer: Any) -> set[int]:
    """Find every token that the model's own settings call an end, as TRL's trainer takes them."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has no generation_config.json
        found = None
    ends = found if isinstance(found, list) else [found]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
