#!/usr/bin/env python3
"""Measure a training step: TRL's padded path against flat layouts, on the lengths of agents' sessions.

  python scripts/bench_train.py --sets qwen_code claude_code codex pi --json bench.json   # CPU: tiny model, 2 minutes
  python scripts/bench_train.py --max_passes 2                                            # the padded ways, too
  python scripts/bench_train.py --sets qwen_code --model 4b --lora_rank 32 --scale 1 --repeat 2            # a GPU
  python scripts/bench_train.py --model 0.6b --scale 1 --group_size 8 --max_tokens 65536                   # a GPU

Sets of lengths (scripts/bench/session_lengths.py): published ones (swe, 20k/40, 5k/30), and 16 sessions of one task
and 30 calls behind the measured prompt and tools of an agent. --scale is a factor of all lengths, so that the ratio of
prompt to turns stays. Each set is trained in these ways, one after the other in one process; agents' sets in the last
two only, unless --ways says otherwise:

  trl_padded_per_request  a row per model call, padded as TRL does: to the longest row of the step
  padded_merged           a row per session, padded the same way
  packed_merged           a row per session, no padding
  tree_merged             the same, prefixes that rows share forwarded once; one of several passes twice in the step

A step is forward and backward of all rows (random weights, random ids, loss "dapo") and one AdamW step. The padded
ways forward as many rows at a time as fit --max_tokens, at least one; all their passes have one shape, so that beyond
--max_passes the rest is extrapolated from the mean of those (the table says of how many). "compiled" counts what
torch.compile had to compile in the fastest step: unless it is 0, the step is slower for it. Peak memory is of the
device: what torch allocated on a GPU, resident memory on a CPU. The second table compares seconds, and on a CPU, where
other jobs may run, seconds of the processor.
"""

import argparse
import copy
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parent / name) for name in ("bench", "gpu"))

import numpy as np
import torch
from datasets import Dataset
from fla_tuning import limit_tuning
from model_sizes import QWEN3_06B, QWEN3_4B, QWEN35_4B, VOCABULARY, build_sizes
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from session_lengths import AGENT_TOKENS, SETS, build_rows, build_sessions
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._dynamo.utils import counters
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from trl_padded import build_padded_batch, split_padded_batch

from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.packing import prefix
from polar_trl.grpo.packing.attention import BLOCK_SIZE
from polar_trl.grpo.packing.layout import build_layout
from polar_trl.grpo.packing.packer import build_cost_model
from polar_trl.grpo.packing.supported import find_causal_model
from polar_trl.grpo.rows import Row

WAYS = ("trl_padded_per_request", "padded_merged", "packed_merged", "tree_merged")
TINY = build_sizes(4, 128, 384, 2, 1, 64) | {"vocab_size": 8192}
QWEN3, QWEN35 = ({"vocab_size": VOCABULARY[name]} for name in ("qwen3", "qwen3.5"))
HYBRID = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
"""Of Qwen3.5's architecture: three gated delta nets and one attention layer; heads of 128 are the default."""
MODELS: dict[str, dict[str, int]] = {
    "tiny": TINY,
    # its LM head is as small a part as that of a large model
    "tiny_head": TINY | {"vocab_size": 1024},
    "tiny_hybrid": TINY
    | {f"linear_num_{kind}_heads": 4 for kind in ("key", "value")}
    | {f"linear_{kind}_head_dim": 64 for kind in ("key", "value")},
    "0.6b": QWEN3_06B | QWEN3,
    "4b": QWEN3_4B | QWEN3,
    "3.5-4b": QWEN35_4B | QWEN35 | HYBRID,
}
FULL_PASS = 65_536
"""Tokens of a pass at full lengths."""
GOAL = {"qwen_code": 1.6}
"""How many times faster a tree should be than packed rows."""


class PresetRows(PackedGRPOTrainer):
    """Trains the rows that it is given."""

    preset: list[Row]

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        return self.preset


def build_model(name: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    is_hybrid = "linear_num_key_heads" in MODELS[name]
    make_config, make_model = (Qwen3_5TextConfig, Qwen3_5ForCausalLM) if is_hybrid else (Qwen3Config, Qwen3ForCausalLM)
    config = make_config(**MODELS[name], max_position_embeddings=1 << 18, tie_word_embeddings=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        return make_model._from_config(config, dtype=dtype)


def build_trainer(model: Any, way: str, out: str, args: argparse.Namespace) -> Any:
    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "output_dir": out,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 4096,
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "gradient_checkpointing": not args.keep_activations,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    vocabulary = {str(index): index for index in range(model.config.vocab_size)}
    common: dict[str, Any] = {
        "model": model,
        "reward_funcs": lambda **_: [0.0],
        "processing_class": PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="0", eos_token="1"
        ),
        "train_dataset": Dataset.from_dict({"prompt": ["x"] * 8}),
    }
    if args.lora_rank:
        rank = args.lora_rank
        common["peft_config"] = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    if "padded" in way:
        return GRPOTrainer(args=GRPOConfig(**settings, steps_per_generation=1), **common)
    layout: Any = way.removesuffix("_merged")
    packed = PackedGRPOConfig(**settings, sequence_layout=layout, max_tokens_per_device=args.max_tokens)
    return PresetRows(args=packed, **common)


def load_rows(name: str, way: str, args: argparse.Namespace, vocab_size: int) -> list[Row]:
    group_size = args.group_size or SETS[name].group_size
    sessions = build_sessions(name, num_groups=args.groups, group_size=group_size, scale=args.scale)
    merged = way != "trl_padded_per_request"
    rng = np.random.default_rng(1)
    advantages = rng.normal(size=len(sessions))
    rows = []
    for row in build_rows(name, sessions, merged=merged, vocab_size=vocab_size, scale=args.scale):
        trainable = row.trainable
        logps = np.where(trainable, -math.log(vocab_size), 0.0).astype(np.float32)
        rows.append(
            Row(
                rollout_id=f"r{row.session}",
                advantage=float(advantages[row.session]),
                token_ids_T=row.token_ids,
                trainable_T=trainable,
                logprobs_T=logps,
                policy_versions_T=np.where(trainable, 0, -1),
            )
        )
    return rows


def measure(trainer: Any, rows: list[Row], way: str, args: argparse.Namespace) -> dict[str, float]:
    """One step: seconds, forwarded tokens (padding included), passes and how many of them were measured."""
    trainer.model.train()
    if not args.keep_activations:  # transformers would, in train()
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    device = trainer.accelerator.device
    optimizer = torch.optim.AdamW((p for p in trainer.model.parameters() if p.requires_grad), lr=1e-6)
    trainer.model.zero_grad()
    trainer._step, trainer.current_gradient_accumulation_steps = 0, 1
    compiled, processor, started = counters["stats"]["unique_graphs"], time.process_time(), _now(device)
    if "padded" in way:
        figures = _run_padded(trainer, rows, args, device)
    else:
        trainer.preset, trainer.step.windows = rows, None
        trainer.training_step(trainer.model, [{}])
        metrics = trainer._metrics["train"]
        passes = metrics["polar/forward_passes"][-1]
        figures = {"tokens": metrics["polar/forwarded_tokens"][-1], "passes": passes, "measured": passes}
    seconds = _now(device) - started
    before_step = _now(device)
    optimizer.step()
    seconds *= figures["passes"] / figures["measured"]
    seconds += _now(device) - before_step
    compiled, processor = counters["stats"]["unique_graphs"] - compiled, time.process_time() - processor
    return {**figures, "compiled": compiled, "processor_seconds": processor, "seconds": seconds}


def _run_padded(trainer: Any, rows: list[Row], args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    starts = [int(row.trainable_T.argmax()) for row in rows]
    width = max(starts) + max(len(row.token_ids_T) - start for row, start in zip(rows, starts, strict=True))
    batch_size = max(1, args.max_tokens // width)
    num_passes = math.ceil(len(rows) / batch_size)
    num_items = torch.tensor(float(sum(row.num_trainable for row in rows)), device=device)
    measured = min(num_passes, args.max_passes)
    # what is not run need not be made: TRL's own tensors of all rows would be that many times larger
    longest = (
        max(range(len(rows)), key=starts.__getitem__),
        max(range(len(rows)), key=lambda i: len(rows[i].token_ids_T) - starts[i]),
    )
    some = [rows[i] for i in (*longest, *range(measured * batch_size)) if i < len(rows)][: measured * batch_size + 2]
    batch = build_padded_batch(some, [1.0] * len(some))
    for part in split_padded_batch({k: v[: measured * batch_size] for k, v in batch.items()}, batch_size):
        inputs = {key: value.to(device) for key, value in part.items()} | {"num_items_in_batch": num_items}
        trainer._compute_loss(trainer.model, inputs).backward()
    return {"tokens": num_passes * batch_size * width, "passes": num_passes, "measured": measured}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of resident memory begins anew


def read_peak(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "versions": {package: version(package) for package in ("torch", "transformers", "trl")},
        "date": str(date.today()),
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
        "sets": {name: {} for name in args.sets},
        "tree": {},
    }
    with tempfile.TemporaryDirectory() as out:
        for name in args.sets:
            for way in args.ways:
                trainer = build_trainer(build_model(args.model, device), way, out, args)
                rows = load_rows(name, way, args, trainer.model.config.vocab_size)
                say(f"{name} {way}: {len(rows)} rows, {sum(len(row.token_ids_T) for row in rows):,} tokens")
                if "padded" not in way:
                    warm_up(trainer, rows, way, args)
                reset_peak(device)
                best = min((measure(trainer, rows, way, args) for _ in range(args.repeat)), key=lambda r: r["seconds"])
                report["sets"][name][way] = {**best, "rows": len(rows), "peak_bytes": read_peak(device)}
                say(f"  {best['seconds']:.2f} s, {best['tokens']:,.0f} tokens forwarded, {best['passes']:.0f} passes")
                if way == "tree_merged" and "packed_merged" in report["sets"][name]:
                    report["tree"][name] = compare(name, report["sets"][name], rows, trainer.model)
                add_sums(report)
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
                del trainer
    return report


def warm_up(trainer: Any, rows: list[Row], way: str, args: argparse.Namespace) -> None:
    """Train two rows, each with its prompt and little more, in two passes: all that is compiled is so once.

    A pass of one block of queries would not do: torch.compile specializes on sizes of 1, and then the measured step
    compiles its passes over a kept prefix again.
    """
    short = []
    for row in rows[:2]:
        end = int(row.trainable_T.argmax()) + 3 * BLOCK_SIZE
        arrays = ("token_ids_T", "trainable_T", "logprobs_T", "policy_versions_T")
        short.append(replace(row, **{name: getattr(row, name)[:end] for name in arrays}))
    packer = trainer.step.packer
    packer._args = copy.copy(trainer.args)
    packer._args.max_tokens_per_device = 1
    measure(trainer, short, way, args)
    packer._args = trainer.args


def compare(name: str, measured: dict[str, Any], rows: list[Row], model: Any) -> dict[str, Any]:
    """How many times faster a tree is than packed rows, and how many times fewer tokens and floating-point operations
    of a forward a tree of all rows has."""
    ids = [row.token_ids_T for row in rows]
    cost = build_cost_model(find_causal_model(model))
    segments = build_layout(ids, share_prefixes=True).segments
    operations = sum(cost.cost_of(s.end - s.start, s.depth) for s in segments)
    # on a CPU other jobs may run
    unit = "seconds" if torch.cuda.is_available() else "processor_seconds"
    packed_seconds, tree_seconds = (measured[f"{kind}_merged"][unit] for kind in ("packed", "tree"))
    speedup = packed_seconds / tree_seconds
    return {
        "packed_seconds": packed_seconds,
        "tree_seconds": tree_seconds,
        "speedup": speedup,
        "tokens_allow": sum(map(len, ids)) / segments[-1].end,
        "operations_allow": sum(cost.cost_of(len(row)) for row in ids) / operations,
        "goal": GOAL.get(name),
        "met": speedup >= GOAL[name] if name in GOAL else None,
    }


def add_sums(report: dict[str, Any]) -> None:
    """Over all sets, of the ways that have been through them."""
    sets = report["sets"].values()
    ways = [way for way in report["settings"]["ways"] if all(way in measured for measured in sets)]
    report["seconds_per_step"] = {way: sum(measured[way]["seconds"] for measured in sets) for way in ways}
    report["peak_bytes"] = {way: max(measured[way]["peak_bytes"] for measured in sets) for way in ways}


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def print_report(report: dict[str, Any], ways: Sequence[str]) -> None:
    table = Table(title=f"seconds per step: {report['machine']}, model {report['settings']['model']}")
    for column in (
        "set",
        "way",
        "rows",
        "passes",
        "measured",
        "forwarded tokens",
        "compiled",
        "seconds",
        "peak GB",
        "against the first",
    ):
        table.add_column(column, justify="left" if column in ("set", "way") else "right")
    for name, measured in report["sets"].items():
        for way in ways:
            figures = measured[way]
            ratio = measured[ways[0]]["seconds"] / figures["seconds"]
            table.add_row(
                *(name, way, str(figures["rows"]), f"{figures['passes']:.0f}", f"{figures['measured']:.0f}"),
                *(f"{figures['tokens']:.0f}", str(figures["compiled"]), f"{figures['seconds']:.2f}"),
                f"{figures['peak_bytes'] / 1e9:.2f}",
                f"{ratio:.1f}x",
            )
    Console(width=140).print(table)
    if report["tree"]:
        print_tree(report["tree"])
    print(json.dumps(report["seconds_per_step"]))


def print_tree(compared: dict[str, Any]) -> None:
    table = Table(title="a tree against packed rows: times faster, and times fewer tokens and operations there are")
    for column in ("set", "packed s", "tree s", "faster", "tokens allow", "operations allow", "goal", ""):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, found in compared.items():
        goal = () if found["goal"] is None else (f"{found['goal']:.1f}x", "met" if found["met"] else "missed")
        factors = (found["speedup"], found["tokens_allow"], found["operations_allow"])
        seconds = (found["packed_seconds"], found["tree_seconds"])
        table.add_row(name, *(f"{x:.2f}" for x in seconds), *(f"{x:.2f}x" for x in factors), *goal)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="tiny_head in agents' sets, tiny in others, if left out")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[name for name in SETS if name not in AGENT_TOKENS])
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--groups", type=int, default=1, help="tasks per step")
    parser.add_argument("--group_size", type=int, help="rollouts per task; 16 in agents' sets and 4 in others")
    parser.add_argument("--lora_rank", type=int, help="train LoRA of this rank, on all linear layers")
    parser.add_argument("--scale", type=float, default=0.03, help="factor of all lengths")
    parser.add_argument("--max_tokens", type=int, help="of one pass; 65,536 x scale in agents' sets, 8,192 in others")
    parser.add_argument("--max_passes", type=int, default=8, help="padded passes that are run; the rest is estimated")
    parser.add_argument("--repeat", type=int, default=1, help="the fastest of so many steps counts")
    parser.add_argument("--keep_activations", action="store_true", help="no gradient checkpointing")
    parser.add_argument("--fla_configs", type=int, default=0, help="that each of its kernels tries; 0 for all")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    is_agents = set(args.sets) <= set(AGENT_TOKENS)
    args.model = args.model or ("tiny_head" if is_agents else "tiny")
    args.ways = args.ways or list(WAYS[2:] if is_agents else WAYS)
    args.max_tokens = args.max_tokens or (round(FULL_PASS * args.scale) if is_agents else 8192)
    prefix.LEAST_TOKENS = max(1, round(prefix.LEAST_TOKENS * min(1.0, args.scale)))  # lengths are scaled
    limit_tuning(args.fla_configs)
    report = run(args, lambda text: print(text, flush=True))
    print_report(report, args.ways)


if __name__ == "__main__":
    main()
