"""Plan the GPU memory of a run from its file, a GPU and an accelerate file, and advise where it does not fit.

Nothing is started and no weights are read: the model's configuration is enough. Runs that use no GPU, and accelerate
files whose sharding `memory` does not count, raise `ConfigError`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from transformers.utils import logging as transformers_logging
from trl import ModelConfig, get_peft_config

from polar_trl.configs import find_config
from polar_trl.errors import ConfigError
from polar_trl.grpo.arguments import RunParser, parse_run
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.memory.memory import GIB, MemoryPlan, build_plan
from polar_trl.grpo.memory.setup import QUANTIZED, Setup, Sharding, choose_kernels
from polar_trl.grpo.resume.model_folder import load_config
from polar_trl.tools.memory_plan.hours import Hours, estimate_hours

_REPORTED = 0.98
"""Of the memory in a GPU's name, what CUDA reports and vLLM counts from (79.2 GiB of an A100 "80GB")."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change of the settings, and the bytes that it frees in the fullest phase."""

    change: str
    saved_bytes: int
    fits: bool
    """The run does, with this change alone."""


class PlanParser(RunParser):
    """The parser of a run of so many processes, on a machine that need not have their GPUs."""

    uses_cpu = False
    dataclass_types: Any

    def __init__(self, num_processes: int) -> None:
        super().__init__()

        class OfAllProcesses(PolarGRPOConfig):
            # TRL asks whether the batch of all processes holds whole groups; here there is one process
            world_size = property(lambda _self: num_processes)

        self.dataclass_types = [OfAllProcesses if t is PolarGRPOConfig else t for t in self.dataclass_types]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; without a GPU, transformers accepts `bf16` only beside `use_cpu`."""
        found, rest = super().parse_known_args(args, namespace)
        self.uses_cpu, found.use_cpu = bool(found.use_cpu), True
        if found.bf16 is None:
            found.bf16 = not found.fp16  # as on the GPUs that are planned for
        return found, rest


def read_run(
    config: Path, overrides: Sequence[str], *, gpu: str, gpus: int | None = None, accelerate: str | Path | None = None
) -> tuple[Setup, PolarGRPOConfig]:
    """Read the settings of a run that its memory depends on, and all its arguments. Raises `ConfigError`.

    Args:
        config: The run file.
        overrides: Flags as `polar-trl train` takes them.
        gpu: Memory of one GPU, such as "80GB".
        gpus: How many; None: as the accelerate file says, or one.
    """
    gpu_bytes = parse_memory(gpu)
    sharding, in_file, precision = read_accelerate(accelerate) if accelerate else (None, None, "no")
    num_gpus = (in_file or 1) if gpus is None else gpus
    if num_gpus < 1:
        raise ConfigError(f"--gpus is {num_gpus}; it must be at least 1")
    parser = PlanParser(num_gpus)
    _, args, model = parse_run(parser, ["--config", str(config), *overrides])
    if parser.uses_cpu:
        raise ConfigError("use_cpu is true: this run uses no GPU; add --use_cpu false to plan it for one")
    model_config = load_config(model.model_name_or_path, trust_remote_code=args.trust_remote_code)
    dtype = read_dtype(args, model_config)
    in_half = bool(args.bf16 or args.fp16) or precision in ("bf16", "fp16")
    engine_dtype = getattr(torch, args.engine_dtype) if args.engine_dtype else torch.bfloat16 if in_half else dtype
    longest = args.vllm_max_model_length or model_config.get_text_config().max_position_embeddings
    setup = Setup(
        model_config=model_config,
        dtype=dtype,
        bf16=in_half,
        optim=str(getattr(args.optim, "value", args.optim)),
        gradient_checkpointing=args.gradient_checkpointing,
        checkpointed_layers=args.checkpointed_layers,
        # a trajectory that is longer than the budget is forwarded alone
        num_tokens=max(args.max_tokens_per_device, longest),
        peft_config=get_peft_config(model),
        has_reference=args.beta > 0,
        sharding=_choose_sharding(sharding, num_gpus),
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes,
        engine_share=args.vllm_gpu_memory_utilization,
        engine_num_seqs=args.engine_slots,
        engine_bytes=engine_dtype.itemsize,
        sleeps=args.vllm_enable_sleep_mode,
        max_model_len=longest,
        kernels=choose_kernels(args, model_config),
    )
    return setup, args


def estimate(setup: Setup, args: PolarGRPOConfig, found: MemoryPlan, *, session_tokens: int | None) -> Hours:
    """Estimate the hours of a run whose sessions end at so many tokens; None: at half of the longest. Raises
    `ConfigError`."""
    if session_tokens is not None and not 0 < session_tokens <= setup.max_model_len:
        raise ConfigError(f"--session_tokens is {session_tokens}; it must be from 1 to {setup.max_model_len}")
    with _quiet():
        return estimate_hours(
            setup,
            found,
            sessions=args.per_device_train_batch_size * args.gradient_accumulation_steps,
            max_agents=args.max_agents,
            session_tokens=session_tokens or setup.max_model_len // 2,
            num_steps=args.max_steps if args.max_steps > 0 else None,
        )


def parse_memory(text: str) -> int:
    """Return the bytes that a GPU with this much memory in its name reports: "80GB", "24 GiB", "80"."""
    number = text.strip().lower().removesuffix("gib").removesuffix("gb").removesuffix("g").strip()
    try:
        size = float(number)
    except ValueError:
        size = 0.0
    if not 0 < size < 10_000:
        raise ConfigError(f"--gpu is {text!r}; give the memory of one GPU, such as 80GB")
    return int(size * GIB * _REPORTED)


def read_accelerate(name: str | Path) -> tuple[Sharding | None, int | None, str]:
    """Read an accelerate file: how it shards, over how many processes, in which precision. Raises `ConfigError`."""
    try:
        path = find_config(str(name), "accelerate")
    except ConfigError as error:
        raise ConfigError(f"--accelerate: {error}") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--accelerate {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or "distributed_type" not in found:
        raise ConfigError(f"--accelerate {path} is no accelerate file: it names no distributed_type")
    processes = found.get("num_processes")
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise ConfigError(f"--accelerate {path}: num_processes is {processes!r}; it must be a number above 0")
    return _read_sharding(path, found), processes, str(found.get("mixed_precision", "no"))


def _read_sharding(path: Path, found: Mapping[str, Any]) -> Sharding | None:
    """Read the sharding of an accelerate file; None where it has none of its own."""
    kind = str(found["distributed_type"])
    if kind in ("NO", "MULTI_GPU"):
        return None
    if kind == "FSDP":
        options = _read_options(path, found, "fsdp_config")
        if options.get("fsdp_version") != 2 or options.get("fsdp_offload_params"):
            raise ConfigError(f"--accelerate {path}: plan counts FSDP with fsdp_version 2 and without offloading")
        return "fsdp2"
    if kind == "DEEPSPEED":
        options = _read_options(path, found, "deepspeed_config")
        offloads = any(options.get(f"offload_{part}_device", "none") != "none" for part in ("optimizer", "param"))
        stage = options.get("zero_stage")
        if stage not in (2, 3) or offloads:
            raise ConfigError(f"--accelerate {path}: plan counts ZeRO stages 2 and 3 without offloading")
        return "zero2" if stage == 2 else "zero3"
    raise ConfigError(f"--accelerate {path}: distributed_type {kind!r} is not one that plan counts")


def _read_options(path: Path, found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    options = found.get(name) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"--accelerate {path}: {name} is {options!r}; it must be a mapping of settings")
    return options


def _choose_sharding(sharding: Sharding | None, num_gpus: int) -> Sharding:
    if sharding is not None:
        return sharding
    return "ddp" if num_gpus > 1 else "none"


def read_dtype(args: PolarGRPOConfig, model_config: Any) -> torch.dtype:
    """Return the dtype of the trainer's weights: TRL loads float32 by default (`create_model_from_path`)."""
    wanted = (args.model_init_kwargs or {}).get("dtype", "float32")
    if wanted in ("auto", None):
        wanted = getattr(model_config.get_text_config(), "dtype", None) or model_config.dtype or torch.float32
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, str(wanted), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"model_init_kwargs: dtype {wanted!r} is not one of float32, bfloat16, float16, auto")
    return dtype


def plan(setup: Setup) -> MemoryPlan:
    """Build the plan, without the warnings of transformers and peft about a model without weights."""
    with _quiet():
        return build_plan(setup)


def find_advice(setup: Setup, found: MemoryPlan) -> list[Advice]:
    """Find changes that free memory in the fullest phase, or leave the engine room for a session; the best first."""
    fullest = max(found.phases, key=found.total)
    advice = []
    for change, variant in _list_variants(setup, found):
        changed = plan(variant)
        saved = found.total(fullest) - changed.total(fullest)
        # a change that leaves the engine no room for a session is none
        if changed.kv_sessions and (saved > 0 or (changed.fits and not found.fits)):
            advice.append(Advice(change=change, saved_bytes=saved, fits=changed.fits))
    return sorted(advice, key=lambda item: (not item.fits, -item.saved_bytes))


def _list_variants(setup: Setup, found: MemoryPlan) -> Iterator[tuple[str, Setup]]:
    if not setup.sleeps:
        yield "vllm_enable_sleep_mode: true", replace(setup, sleeps=True)
    if not setup.gradient_checkpointing:
        yield "gradient_checkpointing: true", replace(setup, gradient_checkpointing=True)
    if not setup.kernels.liger:
        yield "use_liger_kernel: true", replace(setup, kernels=replace(setup.kernels, liger=True))
    if found.is_hybrid and not setup.kernels.fla:
        yield "pip install 'polar-trl[kernels]'", replace(setup, kernels=replace(setup.kernels, fla=True))
    if setup.peft_config is None:
        lora = get_peft_config(ModelConfig(use_peft=True, lora_r=32, lora_target_modules="all-linear"))
        yield "use_peft: true, lora_r: 32, lora_target_modules: all-linear", replace(setup, peft_config=lora)
        if setup.optim not in QUANTIZED:
            yield "optim: adamw_8bit", replace(setup, optim="adamw_8bit")
    elif setup.dtype == torch.float32 and setup.is_whole:
        # of the base, which is never stepped: in trained weights small steps would round to nothing
        yield 'model_init_kwargs: {"dtype": "bfloat16"}', replace(setup, dtype=torch.bfloat16)
    if setup.has_reference:
        yield "beta: 0", replace(setup, has_reference=False)
    if setup.num_tokens > setup.max_model_len:
        yield f"max_tokens_per_device: {setup.max_model_len}", replace(setup, num_tokens=setup.max_model_len)
    half = setup.max_model_len // 2
    yield (
        f"vllm_max_model_length: {half}, max_tokens_per_device: {half}",
        replace(setup, max_model_len=half, num_tokens=half),
    )
    if (share := _find_share(setup, found)) != setup.engine_share:
        yield f"vllm_gpu_memory_utilization: {share:g}", replace(setup, engine_share=share)
    if setup.num_gpus > 1 and setup.is_whole:
        yield "--accelerate fsdp2", replace(setup, sharding="fsdp2")


def _find_share(setup: Setup, found: MemoryPlan) -> float:
    """Find the engine's largest share, in steps of 0.05, beside which everything in the same phases fits."""
    share_bytes = int(setup.engine_share * setup.gpu_bytes)
    with_engine = ("load", "rollouts") if setup.sleeps else found.phases
    beside = max(found.total(phase) for phase in with_engine) - share_bytes
    return max(0.05, min(0.95, int((1 - beside / setup.gpu_bytes) * 20) / 20))


@contextmanager
def _quiet() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
