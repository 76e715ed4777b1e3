#!/usr/bin/env python3
"""Compare the ways to serve a LoRA adapter that is being trained: merged and pushed, or beside the base in vLLM.

  bash scripts/gpu/run.sh lora_serving                          Qwen3-4B's sizes, rank 32 on all linear layers
  bash scripts/gpu/run.sh lora_serving --graphs decode          an engine that starts sooner
  bash scripts/gpu/run.sh lora_serving --tiny                   a CPU: small sizes, float32

The base is random in bfloat16, and so is the adapter, whose B is not zero. "Merged": copies of the base's weights with
the adapter merged in float32, rounded to the engine's dtype, go through `load_weights`. "vLLM's LoRA": the tensors of
the adapter go from memory into a slot of an engine that was built for LoRA. Each engine has a process of its own, one
after the other. Sampled at temperature 1 with processed log-probabilities; gaps are |trainer - engine| over all
sampled tokens. In a run the trainer's pass is bfloat16 autocast; the pass in float32 is the policy as it is on disk.
The controls lack the adapter: their gap is what one would see had no push arrived.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lora_engine import Policy, Server, list_ways
from model_sizes import QWEN3_4B, VOCABULARY, build_sizes
from report import Report
from transformers import Qwen3Config

TINY = build_sizes(2, 64, 128, 2, 1, 32)
ENGINES = ("whole", "lora")
COLUMNS = {
    "way": "way",
    "gap": "gap to the trainer's pass: mean / p99 / max (nats)",
    "gap_float32": "gap to the policy in float32",
    "push_s": "push (s)",
    "tokens_per_s": "decoded tokens/s",
    "tokens": "tokens",
    "start_s": "engine start (s)",
    "weights_gb": "engine's weights GB",
}


def run_child(args: argparse.Namespace) -> None:
    """Measure the ways of one engine; rows go to `args.rows`, a JSON line each."""
    from polar_trl.engine.colocate import set_environment

    set_environment(cpu=not torch.cuda.is_available())
    import vllm  # noqa: F401 - slow, like the others: done while the process before this one measures

    sys.stdin.readline()
    config = build_config(args)
    args.vocab_size = config.vocab_size
    policy = Policy(args, config)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args, policy, config, Path(folder))
    rows: list[dict[str, Any]] = []
    scored: list[tuple[dict[str, Any], list[Any], torch.Tensor]] = []
    for way, push, with_adapter in list_ways(policy, server, args.child):
        print(f"{args.child}: {way}", flush=True)
        try:
            pushes = [measure(push) for _ in range(2)]
            samples = [server.sample(args, with_adapter=with_adapter) for _ in range(3)]
            engine = read_logprobs(samples[-1][0])
            row = {
                "way": way,
                "gap": render_gap(policy.score(samples[-1][0]) - engine),
                "push_s": pushes[-1],
                "first_push_s": pushes[0],
                "tokens_per_s": len(engine) / median(seconds for _, seconds in samples[1:]),
                "tokens": len(engine),
                "start_s": server.start_s,
                "weights_gb": server.weights_gb,
            }
            scored.append((row, samples[-1][0], engine))
        except Exception as error:  # noqa: BLE001 - the other ways go on
            traceback.print_exc()
            row = {"way": way, "error": f"{type(error).__name__}: {error}"[:300]}
        rows.append(row)
        write_rows(args.rows, rows)
    policy.to_float32()
    for row, answers, engine in scored:
        row["gap_float32"] = render_gap(policy.score(answers) - engine)
    write_rows(args.rows, rows)


def read_logprobs(answers: list[Any]) -> torch.Tensor:
    """The engine's, of all sampled tokens."""
    steps = (step for answer in answers for step in answer.outputs[0].logprobs)
    return torch.tensor([next(iter(step.values())).logprob for step in steps])


def measure(call: Callable[[], None]) -> float:
    started = time.monotonic()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def render_gap(difference: torch.Tensor) -> str:
    gap = difference.abs()
    return " / ".join(f"{value:.2g}" for value in (gap.mean(), gap.quantile(0.99), gap.max()))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_config(args: argparse.Namespace) -> Qwen3Config:
    sizes = TINY if args.tiny else QWEN3_4B
    vocab_size = 512 if args.tiny else VOCABULARY["qwen3"]
    return Qwen3Config(
        **sizes, vocab_size=vocab_size, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"], dtype="bfloat16"
    )


# In the process that reports.


class Child:
    """The process of one engine. It imports at once, and waits for `finish` before it uses the GPU."""

    def __init__(self, kind: str, args: argparse.Namespace, folder: Path) -> None:
        self.kind, self._rows, self._log = kind, folder / f"{kind}.jsonl", args.out / f"lora_serving_{kind}.log"
        command = [sys.executable, __file__, "--child", kind, "--rows", str(self._rows), "--graphs", args.graphs]
        for key in ("sequences", "sampled", "b_std"):
            command += [f"--{key}", str(getattr(args, key))]
        command += ["--tiny"] if args.tiny else []
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)

    def finish(self, report: Report, timeout_s: float) -> None:
        """Let it measure, and report its rows."""
        problem = ""
        try:
            self._process.communicate(b"go\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            problem = f"stopped after {timeout_s:.0f} s"
            self.stop()
        for line in self._rows.read_text().splitlines() if self._rows.exists() else []:
            row = json.loads(line)
            report.failed |= "error" in row
            report.add(**row)
        if problem or self._process.returncode:
            text = self._log.read_text(errors="replace")
            print(text[-3000:], flush=True)
            errors = [line.strip() for line in text.splitlines() if "Error" in line]
            report.fail(RuntimeError(problem or (errors or ["see its log"])[-1]), way=f"engine: {self.kind}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the figures")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--graphs", default="default", choices=("default", "decode", "none"), help="engine_cuda_graphs"
    )
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--sampled", type=int, default=256, help="tokens of each")
    parser.add_argument("--b_std", type=float, default=0.01, help="of the adapter's B")
    parser.add_argument("--seconds", type=float, default=400, help="for all engines")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
        return
    report = Report("lora_serving", args.out, COLUMNS)
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        children = [Child(kind, args, Path(folder)) for kind in args.engines]
        try:
            for child in children:
                child.finish(report, max(1.0, deadline - time.monotonic()))
        finally:
            for child in children:
                child.stop()
    report.finish()


if __name__ == "__main__":
    main()
