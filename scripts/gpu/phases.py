#!/usr/bin/env python3
"""Measure where the time of a step of long sessions goes, on a random model of real size, on one GPU and on several.

  bash scripts/gpu/run.sh phases --tokenizer MODEL                        # Qwen3-4B's sizes, LoRA, 32 sessions a step
  bash scripts/gpu/run.sh phases --tokenizer MODEL --processes 1 2        # the same on two ranks: per GPU against one
  bash scripts/gpu/run.sh phases --tokenizer MODEL --model tiny --sessions 8 --calls 2 --steps 2      # a rehearsal

The whole of a run but for the meaning of its tokens: PolarGRPOTrainer, agents that are processes (every session makes
--calls calls of --sampled tokens, as many words in between and a shared prompt before), sleep between rollouts and
training, LoRA merged and pushed at every step. Rewards are drawn from the sampled ids. Push, sleep, wake and cache
reset are then timed once more by themselves. Times leave out the first step.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from model_sizes import QWEN3_06B, QWEN3_4B, build_sizes
from report import Report
from training_runs import GAP, build_launch, render_gap
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

SIZES = {"tiny": build_sizes(2, 64, 128, 2, 1, 32), "0.6b": QWEN3_06B, "4b": QWEN3_4B}
COLUMNS = {
    "processes": "GPUs",
    "sessions": "sessions a step",
    "session_tokens": "tokens a session",
    "step_s": "s/step",
    "rollouts": "rollouts",
    "training": "training",
    "overhead": "overhead",
    "sync_s": "push (s)",
    "reset_s": "cache reset (s)",
    "sleep_s": "sleep (s)",
    "wake_s": "wake (s)",
    "planning_s": "planning (s)",
    "gap": "gap mean / p99 / max (nats)",
    "sampled_per_s": "sampled tokens/s per GPU, whole step",
    "peak_gb": "peak GB",
}


AGENT = """
import http.client, json, os, random, sys
from urllib.parse import urlsplit

WORDS = "the of to and in is for on that with file line test code value".split()
def words(count, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))

calls, prompt, sampled = map(int, sys.argv[1:4])
task = sys.argv[4]
url = urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = [{"role": "system", "content": words(prompt, "system")}, {"role": "user", "content": task}]
connection = http.client.HTTPConnection(url.netloc, timeout=3600)
for number in range(calls):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": sampled}
    connection.request("POST", url.path.rstrip("/") + "/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        sys.exit(f"call {number}: {response.status} {answer}")
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""})
    messages.append({"role": "user", "content": words(sampled, f"{task}-{number}")})
"""
"""An agent whose sessions have a set length: so many calls, and as many words after each as it may sample."""


def make_model(name: str, tokenizer_folder: str, folder: Path) -> None:
    """Save a random Qwen3 of these sizes, with the tokenizer's vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        **SIZES[name],
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def reward(rollouts: list[Any], **_: Any) -> list[float]:
    """Noise that depends on what was sampled: groups have variance, and there is a gradient."""
    return [sum(sum(call.completion.token_ids) for call in rollout.calls) % 97 / 97 for rollout in rollouts]


def train(args: argparse.Namespace) -> None:
    """One rank of one run; rank 0 writes what it measured."""
    from peft import LoraConfig

    from polar_trl.grpo.config import PolarGRPOConfig
    from polar_trl.grpo.trainer import PolarGRPOTrainer
    from polar_trl.harness.shell import ShellHarness
    from polar_trl.types import Task

    on_gpu = torch.cuda.is_available()
    group = 8 if args.sessions % 8 == 0 else args.sessions
    config = PolarGRPOConfig(
        output_dir=str(args.folder / "run"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=args.sessions,
        num_generations=group,
        max_steps=args.steps,
        learning_rate=1e-5,
        max_completion_length=args.sampled,
        vllm_max_model_length=args.prompt + args.calls * 2 * args.sampled + 2048,
        vllm_gpu_memory_utilization=0.4,
        vllm_enable_sleep_mode=on_gpu,
        max_agents=args.sessions,
        max_tokens_per_device=args.max_tokens,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        renderer="template",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        show_rollout_progress=False,
        disable_tqdm=True,
    )
    command = f"python3 -I -S ~/long_session.py {args.calls} {args.prompt} {args.sampled}"
    trainer = PolarGRPOTrainer(
        model=str(args.folder / "model"),
        args=config,
        train_dataset=[Task(id=f"t{n}", instruction=f"task {n}", agent_timeout_s=1200.0) for n in range(64)],
        harness=ShellHarness(command + " {instruction}", files={"long_session.py": AGENT}),
        reward_funcs=reward,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    result = {"log": trainer.state.log_history, "alone": time_alone(trainer)}
    if on_gpu:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if trainer.accelerator.is_main_process:
        (args.folder / "result.json").write_text(json.dumps(result))
    trainer.close()


def time_alone(trainer: Any, repeats: int = 5) -> dict[str, float]:
    """Median seconds of what stands between rollouts and training, with the device waited for."""
    generation = trainer.vllm_generation
    seconds: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], Any]) -> None:
        began = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    def reset() -> None:
        with generation.engine.paused():
            generation.llm.reset_prefix_cache()

    for _ in range(repeats):
        measure("sync", generation.sync_weights)
        measure("wake", generation.wake)
        measure("reset", reset)
        measure("sleep", generation.sleep)
    return {name: median(values) for name, values in seconds.items()}


def describe(result: dict[str, Any], args: argparse.Namespace, processes: int) -> dict[str, Any]:
    """Figures of the steps after the first."""
    steps = [line for line in result["log"] if "polar/phase/step_s" in line]
    later = steps[1:] or steps
    total = sum(line["polar/phase/step_s"] for line in later)

    def share(*names: str) -> str:
        return f"{sum(line[f'polar/phase/{name}_s'] for line in later for name in names) / total:.1%}"

    last = [line for line in steps if f"{GAP}/mean" in line][-1]
    return {
        "processes": processes,
        "sessions": args.sessions * processes,
        "session_tokens": fmean(line["polar/unique_tokens"] for line in later) / args.sessions / processes,
        "step_s": total / len(later),
        "rollouts": share("rollouts"),
        "training": share("training", "optimizer"),
        "overhead": f"{fmean(line['polar/phase/overhead_share'] for line in later):.1%}",
        **{f"{name}_s": value for name, value in result["alone"].items()},
        "planning_s": fmean(line["polar/phase/planning_s"] for line in later),
        "gap": render_gap(last),
        "sampled_per_s": sum(line["polar/sampled_tokens"] for line in later) / total / processes,
        "peak_gb": result.get("peak_gb", 0.0),
        "log": steps,
    }


def run_ranks(args: argparse.Namespace, processes: int) -> dict[str, Any]:
    """The same script once more, as so many ranks."""
    (args.folder / "result.json").unlink(missing_ok=True)
    flags = ["--child", "--folder", str(args.folder)]
    for name in ("tokenizer", "sessions", "calls", "prompt", "sampled", "steps", "max_tokens"):
        flags += [f"--{name}", str(getattr(args, name))]
    log = args.out / f"{args.name}-x{processes}.txt"
    visible = ",".join(map(str, range(processes))) if torch.cuda.device_count() > processes else None
    with log.open("wb") as file:
        code = subprocess.call(
            [*build_launch(processes), __file__, *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})},
        )
    if code != 0:
        print(log.read_text(errors="replace")[-3000:], flush=True)
        raise RuntimeError(f"the run on {processes} ranks ended with {code}; see {log.name}")
    return json.loads((args.folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--model", choices=SIZES, default="4b", help="sizes of the random model")
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="ranks, one after the other")
    parser.add_argument("--sessions", type=int, default=32, help="per rank and step")
    parser.add_argument("--calls", type=int, default=6, help="of a session")
    parser.add_argument("--prompt", type=int, default=2000, help="words of the shared prompt")
    parser.add_argument("--sampled", type=int, default=300, help="tokens of an answer, and words seen after it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--max_tokens", type=int, default=32768, help="of one forward pass")
    parser.add_argument("--name", default="phases", help="of the figures")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for them")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return train(args)
    report = Report(args.name, args.out, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        make_model(args.model, args.tokenizer, args.folder / "model")
        report.say(f"a random model of {args.model}'s sizes is on the disk")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for processes in args.processes:
            try:
                report.add(**describe(run_ranks(args, processes), args, processes))
            except (RuntimeError, KeyError, IndexError) as error:
                report.fail(error, processes=processes)
    report.finish()


if __name__ == "__main__":
    main()
