"""Judge the engine: greedy text and logprobs in each CUDA graph mode against transformers, then the sampling gap.

  bash scripts/gpu/run.sh correct .cache/models/SmolLM2-135M-Instruct
  bash scripts/gpu/run.sh correct MODEL --modes decode full
  bash scripts/gpu/run.sh correct MODEL --greedy-tokens 6 --num-sampled 4 --sampled-tokens 12       # on a CPU

For each setting of `engine_cuda_graphs`, and for vLLM's mode FULL, which the trainer refuses, an engine is built in a
process of its own, as the trainer builds it, and answers small batches from a cold prefix cache: where wrong graphs
show. What it sampled is scored here by transformers in float32 and bfloat16. Then it samples at temperatures 0.7 and
1.0, and the trainer's own pass scores that. A batch is right when its mean gap to float32 is within the tolerance of
the trainer's start-up check, and wherever a token is not float32's own choice the two are a tie within twice that.
"""

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from correct_sampling import Batch, Request, read_samples, run_sampling, write_batches
from correct_scoring import Fidelity, Judge
from report import Report, render_table
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

COLUMNS = {
    "mode": "engine_cuda_graphs",
    "graphs": "vLLM ran",
    "batch": "batch, cold cache",
    "prompts": "prompts",
    "tokens": "tokens",
    "answer": "first answer",
    "same": "tokens before the first that differs from float32 / bfloat16 text",
    "ties": "tokens that are not float32's choice (first and widest tie, nats)",
    "gap_float32": "gap to float32: mean / p99 / max (nats)",
    "gap_bfloat16": "gap to bfloat16",
    "verdict": "verdict",
}
FIDELITY_COLUMNS = {
    "mode": "engine_cuda_graphs",
    "temperature": "temperature",
    "prompts": "prompts",
    "tokens": "tokens",
    "trainer_bfloat16": "engine to trainer in bfloat16: mean / p99 / max (nats)",
    "trainer_float32": "engine to trainer in float32",
    "transformers_float32": "engine to transformers in float32",
    "precision": "trainer in bfloat16 to float32",
}
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 17 + 25?",
    "Name three colours.",
)
OPENINGS = (
    "The river rose in the night, and by the morning",
    "import os\n\n\ndef list_files(folder):\n",
    "One, two, three, four, five, six, seven,",
    "Dear reader, this letter is about how bread is made. First,",
)
TOPICS = (
    *("rivers", "sorting a list", "the moon", "bread", "git branches", "whales", "prime numbers", "old maps"),
    *("rain", "binary search", "the planet Mars", "cheese", "unit tests", "owls", "fractions", "lighthouses"),
)
TASKS = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "What is hard about {}?",
)


@dataclass(eq=False)
class Engine:
    """The process that has the engine of one mode."""

    mode: str
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, args: argparse.Namespace) -> None:
        """Begin with the imports; nothing happens on the GPU until `run`."""
        command = [sys.executable, __file__, args.model, "--out", str(args.out), "--memory", str(args.memory)]
        command += ["--sample", self.mode, "--exchange", str(self.folder)]
        self.log = args.out / f"correct_{self.mode}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)

    @property
    def samples_path(self) -> Path:
        return self.folder / f"{self.mode}.jsonl"

    def run(self, timeout_s: float) -> None:
        """Build the engine, answer every batch, end."""
        try:
            self.process.communicate(b"go\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise
        if self.process.returncode:
            raise RuntimeError(f"exit {self.process.returncode}: {self.read_last_error()}")

    def read_last_error(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if "Error" in line]
        return lines[-1].strip() if lines else f"see {self.log}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def build_batches(tokenizer: Any, args: argparse.Namespace) -> list[Batch]:
    """Four short prompts at once, one alone, eight of mixed lengths that arrive while four decode; then sampling."""

    def ask(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    short = [Request(prompt_ids=ask(question), max_tokens=args.greedy_tokens) for question in QUESTIONS]
    decoding = [
        Request(prompt_ids=tokenizer(opening)["input_ids"], max_tokens=8 * args.greedy_tokens) for opening in OPENINGS
    ]
    arriving = [
        Request(
            # 1, 2, 4 ... 128 copies of a sentence: about 40 to 900 tokens
            prompt_ids=ask("The sea was grey that day. " * 2**number + QUESTIONS[number % 4]),
            max_tokens=args.greedy_tokens,
            delay_s=0.08 + 0.03 * number,
        )
        for number in range(8)
    ]
    questions = [ask(task.format(topic)) for topic in TOPICS for task in TASKS]
    sampled = [
        Request(prompt_ids=questions[number % len(questions)], max_tokens=args.sampled_tokens)
        for number in range(args.num_sampled)
    ]
    return [
        Batch(name="4 short at once", temperature=0.0, requests=short),
        Batch(name="1 alone", temperature=0.0, requests=short[:1]),
        Batch(name="4 decoding, 8 arriving", temperature=0.0, requests=[*decoding, *arriving]),
        *(Batch(name=f"temperature {t}", temperature=t, requests=sampled) for t in (0.7, 1.0)),
    ]


def run_mode(
    report: Report, engine: Engine, batches: Sequence[Batch], judge: Judge, fidelity: Fidelity, *, timeout_s: float
) -> None:
    """All rows of one mode; what was sampled before a failure is scored too."""
    shown = "FULL" if engine.mode == "full" else engine.mode
    try:
        engine.run(timeout_s)
    except Exception as error:  # noqa: BLE001 - the other modes go on
        report.fail(error, mode=shown, batch="engine")
    header, samples = read_samples(engine.samples_path)
    if header is None:
        return
    report.say(f"{engine.mode}: {header}")
    report.content["engines"][engine.mode] = header
    if engine.mode == "full" and header["refusal"]:
        report.add(
            mode="FULL", batch="trainer's engine", answer=f"EngineError: {header['refusal']}", verdict="refused"
        )
        shown = "FULL, run all the same"
    for batch in batches:
        if batch.name not in samples:
            continue
        try:
            if batch.temperature == 0.0:
                row = judge.judge(batch, samples[batch.name], header["dtype"])
                report.add(mode=shown, graphs=header["cudagraph_mode"], **row)
                report.failed |= row["verdict"] == "WRONG" and engine.mode != "full"
            elif engine.mode != "full":
                row = {"mode": shown, **fidelity.measure(batch, samples[batch.name])}
                report.content["fidelity"].append(row)
                report.failed |= "failed" in row
                report.say(render_table([row], FIDELITY_COLUMNS).splitlines()[-1])
                report.save()
        except Exception as error:  # noqa: BLE001 - the other batches go on
            report.fail(error, mode=shown, batch=batch.name)


def show_refused_setting(report: Report) -> None:
    """Return what a run file that asks for mode FULL gets."""
    from polar_trl.errors import ConfigError
    from polar_trl.grpo.config import PolarGRPOConfig

    try:
        PolarGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, engine_cuda_graphs="FULL")
    except ConfigError as error:
        report.add(mode="FULL", batch="run file", answer=f"ConfigError: {error}", verdict="refused")
    else:
        report.fail(AssertionError("engine_cuda_graphs: FULL was accepted"), mode="FULL", batch="run file")


def run_modes(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """One engine after the other. While one works, the next process is at its imports."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batches = build_batches(tokenizer, args)
    write_batches(folder / "batches.json", batches)
    engines = [Engine(mode, folder) for mode in args.modes]
    engines[0].start(args)
    try:
        show_refused_setting(report)
        greedy = [batch for batch in batches if batch.temperature == 0.0]
        judge = Judge(args.model, tokenizer, greedy, device, max_text=args.greedy_tokens)
        report.say("reference texts are there")
        for batch in greedy:
            report.add(mode="(transformers bfloat16)", graphs="", **judge.judge_bfloat16(batch))
        fidelity = Fidelity(args.model, judge.references["float32"], device)
        for number, engine in enumerate(engines):
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # vLLM measures what is free, and wants it to stay
            if number + 1 < len(engines):
                engines[number + 1].start(args)
            report.say(f"{engine.mode}: building the engine")
            run_mode(report, engine, batches, judge, fidelity, timeout_s=args.timeout)
    finally:
        for engine in engines:
            if hasattr(engine, "process") and engine.process.poll() is None:
                engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub id of a causal language model with a chat template")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for correct.json and engines' logs")
    parser.add_argument(
        "--modes", nargs="+", choices=("decode", "none", "default", "full"), help="default: all; on a CPU none"
    )
    parser.add_argument("--greedy-tokens", type=int, default=32)
    parser.add_argument("--num-sampled", type=int, default=64, help="prompts per temperature")
    parser.add_argument("--sampled-tokens", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory for the engine")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one engine, imports excluded")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample:
        samples = args.exchange / f"{args.sample}.jsonl"
        run_sampling(args.model, args.sample, args.exchange / "batches.json", samples, memory_share=args.memory)
        return
    transformers_logging.disable_progress_bar()
    report = Report("correct", args.out, COLUMNS)
    report.note(engines={}, fidelity=[])
    if not torch.cuda.is_available():
        report.say("a CPU has no CUDA graphs: every mode is 'none' there, and mode FULL cannot be shown to be wrong")
    args.modes = args.modes or (["decode", "none", "default", "full"] if torch.cuda.is_available() else ["none"])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_modes(args, report, Path(folder))
        except Exception as error:  # noqa: BLE001 - what was measured is printed all the same
            report.fail(error, mode="", batch="")
    report.note(seconds=round(time.monotonic() - started, 1))
    print(render_table(report.content["fidelity"], FIDELITY_COLUMNS), end="\n\n")
    report.finish()


if __name__ == "__main__":
    main()
