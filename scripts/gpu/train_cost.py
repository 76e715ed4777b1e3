"""Measure a training step of a real model's sizes at 16k, 32k and 64k tokens: tokens per second, MFU, memory.

  bash scripts/gpu/run.sh train_cost                                          all cases, at most 330 s
  bash scripts/gpu/run.sh train_cost --cases qwen3.5-4b:lora:16384 --seconds 120
  bash scripts/gpu/run.sh train_cost --cases qwen3-4b:lora:16384:liger:auto qwen3-4b:full:16384
  bash scripts/gpu/run.sh train_cost --tiny                                   a CPU: small sizes, short rows

Weights are random, made on the device: in bfloat16 beside an adapter, in float32 (bfloat16 products) where all are
trained. A step is `PackedGRPOTrainer.training_step` over rows that fill one pass (30% of the tokens trained, no prefix
shared) and an AdamW step. Every layer is checkpointed unless the case says otherwise: after its tokens it may have

  keep      no layer is checkpointed
  auto      as many layers are checkpointed as the card's memory needs
  80gb      of the card's memory 80 GB are used
  liger     Liger's norms, SwiGLU and rotary embedding
  peft      PEFT's own LoRA layers, operation by operation
  profile   one step more is profiled

Where all weights are trained a step is two passes, as the second meets the gradients of the first. The first step
compiles; the median of three more counts. MFU is what `train_flops.Flops.model` counts, which leaves out what gradient
checkpointing computes again, per second, over the card's peak; "hardware %" has it in. `plan GB` is what `polar-trl
plan` predicts for the same pass, beside the engine, what CUDA takes, and the low halves of masters, which a plain
AdamW has not; `peak GB` is torch's own count.

Sizes: Qwen3-0.6B and Qwen3-4B as published (arXiv:2505.09388, table 1, and their model cards);
Qwen3.5-4B's text model as on its model card. What that does not say is the default of transformers'
`Qwen3_5TextConfig`: head_dim 256, delta net heads of 128, full attention in one layer of four. That makes 4.02, 0.60
and 4.21 billion weights.
"""

import argparse
import gc
import importlib.util
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch._dynamo
from bench_train import PresetRows, read_peak, reset_peak
from datasets import Dataset
from fla_tuning import limit_tuning
from kernel_shares import profile_step
from model_sizes import QWEN3_06B, QWEN3_4B, QWEN35_4B, VOCABULARY, build_sizes
from peft import LoraConfig
from report import Report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from train_flops import Flops, count_flops, find_peak
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.liger import apply_liger_kernel

from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.memory.checkpointing import Checkpointing
from polar_trl.grpo.memory.kernel_shapes import Kernels
from polar_trl.grpo.memory.memory import (
    ALLOWANCE,
    SPARE,
    choose_checkpointed,
    count_gradients,
    count_kept,
    count_low_halves,
    count_training,
)
from polar_trl.grpo.memory.setup import Setup
from polar_trl.grpo.packing import adapters, fla_kernels, forward
from polar_trl.grpo.packing.linear_attention import is_gated_delta_net
from polar_trl.grpo.rows import Row

MODELS = {"qwen3.5-4b": QWEN35_4B, "qwen3-4b": QWEN3_4B, "qwen3-0.6b": QWEN3_06B}
TINY = build_sizes(4, 64, 128, 4, 2, 16)
DELTA_NET = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
ROW_LENGTHS = (7168, 5120, 4096, 16384, 8192, 12288, 12288)
"""Tokens per row: the first three are a pass of 16,384, the first four of 32,768, all of 65,536."""
TOKENS = (16384, 32768, 65536)
TURN, SAMPLED = 1000, 300
"""Of each so many tokens of a row, the last so many are trained."""
TINY_SCALE = 64
CARD_80GB = int(79.2 * (1 << 30))
"""What an 80 GB card reports."""
OPTIONS = ("keep", "auto", "80gb", "liger", "peft", "profile")
CASES = tuple(
    f"{name}:{tokens}"
    for tokens in TOKENS
    for name in ("qwen3.5-4b:lora", "qwen3-0.6b:full", "qwen3-4b:lora", "qwen3-0.6b:lora")
)
COLUMNS = {
    "model": "model",
    "tuning": "tuning",
    "tokens": "tokens",
    "passes": "passes",
    "attention": "attention",
    "delta_rule": "linear attention",
    "norms": "norms, MLP",
    "lora": "LoRA",
    "checkpointing": "layers checkpointed",
    "step_s": "forward, backward s",
    "optimizer_s": "optimizer s",
    "tokens_per_s": "tokens/s",
    "tflops": "model TFLOP/s",
    "mfu": "MFU %",
    "hardware": "hardware %",
    "peak_gb": "peak GB",
    "plan_gb": "plan GB",
    "plan_ratio": "plan / peak",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    tuning: str
    """"lora" or "full"."""
    tokens: int
    """Of a pass."""
    options: tuple[str, ...] = ()

    @property
    def checkpointed_layers(self) -> int | None:
        """For `checkpointed_layers` of the config."""
        return None if "auto" in self.options else 0 if "keep" in self.options else 1 << 10

    @property
    def liger(self) -> bool:
        return "liger" in self.options

    @classmethod
    def parse(cls, text: str) -> "Case":
        """MODEL:TUNING:TOKENS and options, with colons between."""
        model, tuning, tokens, *options = text.split(":")
        if model not in MODELS or tuning not in ("lora", "full") or int(tokens) not in TOKENS:
            raise ValueError(text)
        if not {*options} <= {*OPTIONS}:
            raise ValueError(text)
        return cls(model=model, tuning=tuning, tokens=int(tokens), options=tuple(options))

    @property
    def label(self) -> str:
        return " ".join((self.model, self.tuning, str(self.tokens), *self.options))

    @property
    def passes(self) -> int:
        """Of a step; there are no rows for two of the longest."""
        return 2 if self.tuning == "full" and self.tokens < TOKENS[-1] else 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights on a GPU: those that an optimizer steps are float32."""
        return torch.float32 if self.tuning == "full" else torch.bfloat16


def build_config(name: str, *, tiny: bool) -> Any:
    sizes: dict[str, Any] = {**(TINY if tiny else MODELS[name]), "max_position_embeddings": 1 << 18}
    sizes |= {"vocab_size": 512 if tiny else VOCABULARY[name.partition("-")[0]], "tie_word_embeddings": True}
    if name != "qwen3.5-4b":
        return Qwen3Config(**sizes)
    heads = {key: value // 8 for key, value in DELTA_NET.items()} if tiny else DELTA_NET
    dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16} if tiny else {}
    return Qwen3_5TextConfig(**sizes, **heads, **dims)


def build_adapter(case: Case) -> LoraConfig | None:
    if case.tuning == "full":
        return None
    return LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")


def build_trainer(case: Case, out: str, *, tiny: bool) -> Any:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    config = build_config(case.model, tiny=tiny)
    make: Any = Qwen3_5ForCausalLM if case.model == "qwen3.5-4b" else Qwen3ForCausalLM
    with torch.device("cuda" if on_gpu else "cpu"):
        model = make._from_config(config, dtype=case.dtype if on_gpu else torch.float32)
    args = PackedGRPOConfig(
        output_dir=out,
        per_device_train_batch_size=8,
        num_generations=8,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=True,
        checkpointed_layers=case.checkpointed_layers,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=case.liger,
        sequence_layout="packed",
        max_tokens_per_device=case.tokens // (TINY_SCALE if tiny else 1),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    words = Tokenizer(WordLevel({"0": 0, "1": 1}))
    trainer = PresetRows(
        model=model,
        reward_funcs=lambda **_: [0.0],
        args=args,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        peft_config=build_adapter(case),
    )
    trainer.model.train()
    # transformers would do these in train()
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.liger:
        apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
    trainer.step.checkpointing = build_checkpointing(case, trainer)
    trainer.preset = build_rows(case.passes * case.tokens, config.vocab_size, scale=TINY_SCALE if tiny else 1)
    return trainer


def build_checkpointing(case: Case, trainer: Any) -> Checkpointing:
    """The trainer's, within the memory that the case may use; what a pass takes is counted once for a model."""
    found: Checkpointing = trainer.step.checkpointing
    read_room = found._read_room

    def read_less() -> float:
        room = read_room()
        if room is None:  # a CPU, whose small model has room for all
            return 1e12
        return room - (torch.cuda.get_device_properties(0).total_memory - find_memory(case)) * (1 - SPARE)

    found._read_room = read_less
    found.count = partial(_count_once, (case.model, case.tuning, case.liger), found.count)  # type: ignore[method-assign]
    return found


_COUNTED: dict[Any, Any] = {}


def _count_once(key: Any, count: Callable[[int], Any], num_tokens: int) -> Any:
    """The first trainer of a model counts for the others: it takes a processor's time while the card waits."""
    return _COUNTED.setdefault(key, count)(num_tokens)


@contextmanager
def own_module(case: Case) -> Iterator[None]:
    """Compute as the case says, only as long as it runs. Liger replaces classes and functions of transformers'
    module, and the others are replaced in ours."""
    make: Any = Qwen3_5ForCausalLM if case.model == "qwen3.5-4b" else Qwen3ForCausalLM
    modules = [vars(sys.modules[make.__module__]), vars(forward)]
    before = [dict(module) for module in modules]
    if "peft" in case.options:
        forward.fuse_adapters = spare_casts  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, names in zip(modules, before, strict=True):
            module.update(names)


def spare_casts(model: Any) -> None:
    """Leave LoRA's layers as PEFT has them, but for their inputs' way to float32 and back."""
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "_cast_input_dtype"):
            module._cast_input_dtype = MethodType(adapters._cast_input, module)


def build_rows(num_tokens: int, vocab_size: int, *, scale: int) -> list[Row]:
    """Random rows that fill one pass of `num_tokens`, or two of half as many, all `scale` times shorter."""
    count = list(accumulate(ROW_LENGTHS)).index(num_tokens) + 1
    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(n // scale for n in ROW_LENGTHS[:count]):
        trainable = np.arange(length) * scale % TURN >= TURN - SAMPLED
        rows.append(
            Row(
                rollout_id=f"r{index}",
                advantage=float(rng.normal()),
                token_ids_T=rng.integers(vocab_size, size=length),
                trainable_T=trainable,
                logprobs_T=np.where(trainable, -math.log(vocab_size), 0.0).astype(np.float32),
                policy_versions_T=np.where(trainable, 0, -1),
            )
        )
    return rows


def run_case(case: Case, args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure one case."""
    with tempfile.TemporaryDirectory() as out:
        trainer = build_trainer(case, out, tiny=args.tiny)
    device = trainer.accelerator.device
    report.say(f"{case.label}: model made")
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=device.type == "cuda")

    def step() -> tuple[float, float]:
        started = read_clock()
        trainer._step, trainer.current_gradient_accumulation_steps, trainer.step.windows = 0, 1, None
        trainer.training_step(trainer.model, [{}])
        between = read_clock()
        optimizer.step()
        optimizer.zero_grad()
        return between - started, read_clock() - between

    limit_tuning(args.tune)
    warm_up = sum(step())
    report.say(f"{case.label}: the first step, with compiling, took {warm_up:.1f} s")
    reset_peak(device)
    steps = [step() for _ in range(args.repeat)]
    peak_bytes = read_peak(device)
    (num_passes,) = {int(count) for count in trainer._metrics["train"]["polar/forward_passes"]}
    step_s, optimizer_s = (statistics.median(times) for times in zip(*steps, strict=True))
    lengths = [len(row.token_ids_T) for row in trainer.preset]
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    num_scored = sum(row.num_trainable for row in trainer.preset)
    num_layers = policy.config.get_text_config().num_hidden_layers
    chosen = round(trainer._metrics["train"]["polar/checkpointed_layers"][-1])
    flops = count_flops(policy, lengths, num_scored, checkpointed=chosen / num_layers)
    row = {
        "tokens": sum(lengths),
        **describe_kernels(case, policy, device),
        "checkpointing": f"{chosen} of {num_layers}",
        "step_s": step_s,
        "optimizer_s": optimizer_s,
        "tokens_per_s": sum(lengths) / (step_s + optimizer_s),
        **compare_with_peak(flops, step_s + optimizer_s),
        "peak_gb": peak_bytes / 1e9,
        "passes": num_passes,
        "warm_up_s": warm_up,
        "all_steps_s": [sum(times) for times in steps],
        "flops": {name: getattr(flops, name) for name in Flops.__slots__},
    }
    if "profile" in case.options:
        row["profile"] = profile_step(step, report.say)
    return row


def compare_with_peak(flops: Flops, seconds: float) -> dict[str, float]:
    found = {"tflops": flops.model / seconds / 1e12}
    peak = find_peak()
    if peak is not None:
        found |= {"mfu": 100 * flops.model / seconds / peak, "hardware": 100 * flops.hardware / seconds / peak}
    return found


def describe_kernels(case: Case, model: Any, device: torch.device) -> dict[str, str]:
    net = next((module for module in model.modules() if is_gated_delta_net(module)), None)
    kernels = "flash-linear-attention" if net is not None and fla_kernels.find_kernels(net, device) else "torch"
    return {
        "attention": "FlexAttention" if device.type == "cuda" else "SDPA by segment",
        "lora": "none" if case.tuning == "full" else "PEFT's" if "peft" in case.options else "in the products",
        "delta_rule": "none" if net is None else kernels,
        "norms": "Liger" if case.liger else "torch",
    }


def build_setup(case: Case, gpu_bytes: int = CARD_80GB, *, tiny: bool) -> Setup:
    """Of the training phase of such a run, without an engine."""
    has_fla = not tiny and importlib.util.find_spec("fla") is not None
    return Setup(
        model_config=build_config(case.model, tiny=tiny),
        dtype=torch.float32 if tiny else case.dtype,
        bf16=not tiny,
        optim="adamw_torch_fused",
        gradient_checkpointing=True,
        checkpointed_layers=case.checkpointed_layers,
        num_tokens=case.tokens // (TINY_SCALE if tiny else 1),
        peft_config=build_adapter(case),
        has_reference=False,
        sharding="none",
        num_gpus=1,
        gpu_bytes=gpu_bytes,
        engine_share=0.0,
        engine_num_seqs=1,
        sleeps=True,
        max_model_len=case.tokens,
        kernels=Kernels(fla=has_fla and case.model == "qwen3.5-4b", liger=case.liger),
    )


def predict_bytes(setup: Setup) -> int:
    """Predict torch's peak in the training phase as `polar-trl plan` does, with a plain AdamW."""
    kept = sum(count_kept(setup).values()) - count_low_halves(setup)
    checkpointed = choose_checkpointed(setup, kept + count_gradients(setup) + ALLOWANCE)
    return kept + sum(count_training(setup, checkpointed).values())


def predict_case(case: Case, gpu_bytes: int, *, tiny: bool) -> int:
    return predict_bytes(build_setup(case, gpu_bytes, tiny=tiny))


def find_memory(case: Case) -> int:
    """Bytes of the card that the case may use."""
    has = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else CARD_80GB
    return CARD_80GB if "80gb" in case.options else has


def read_clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run(args: argparse.Namespace, report: Report, predict: Callable[[Case], Future[int]]) -> None:
    started = time.monotonic()
    predicted = {case: predict(case) for case in args.cases}
    done: list[tuple[Case, dict[str, Any]]] = []
    for case in args.cases:
        names = {"model": case.model, "tuning": case.tuning, "tokens": case.tokens}
        if time.monotonic() - started > args.seconds:
            report.add(**names, error=f"not run: {args.seconds} s were over")
            continue
        try:
            with own_module(case):
                row = run_case(case, args, report)
            report.add(**(names | row))
            done.append((case, report.content["rows"][-1]))
        except Exception as error:  # noqa: BLE001 - the other cases go on
            traceback.print_exc()
            report.fail(error.with_traceback(None), **names)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for case, row in done:
        try:
            row["plan_gb"] = predicted[case].result(timeout=args.plan_seconds) / 1e9
            if torch.cuda.is_available():  # elsewhere the peak is the process's
                row["plan_ratio"] = row["plan_gb"] / row["peak_gb"]
        except Exception as error:  # noqa: BLE001 - what was measured is printed all the same
            report.say(f"{case.label}: no prediction: {type(error).__name__}: {error}")
    report.save()


def parse_case(text: str) -> Case:
    try:
        return Case.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no case; such as {', '.join(CASES[:3])}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the figures")
    parser.add_argument("--cases", nargs="+", type=parse_case, default=[Case.parse(text) for text in CASES])
    parser.add_argument("--seconds", type=float, default=330, help="no case is begun after so many")
    parser.add_argument("--plan_seconds", type=float, default=60, help="waited for predictions at the end")
    parser.add_argument("--repeat", type=int, default=3, help="steps after the first; the median counts")
    parser.add_argument("--tune", type=int, default=4, help="configurations tried per Triton kernel; 0: all")
    parser.add_argument("--tiny", action="store_true", help="small sizes and short rows, for a CPU")
    args = parser.parse_args()
    # a training run has one model; here each brings shapes that FlexAttention is compiled for anew, and beyond 8 of
    # them torch would fall back to uncompiled attention, with a matrix of all pairs of tokens
    torch._dynamo.config.recompile_limit = 64
    report = Report("train_cost", args.out, COLUMNS)
    # predictions take a processor's time, not the GPU's
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        run(args, report, lambda case: pool.submit(predict_case, case, find_memory(case), tiny=args.tiny))
        pool.shutdown(wait=False, cancel_futures=True)
    report.finish()


if __name__ == "__main__":
    main()
