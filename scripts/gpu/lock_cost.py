"""What the proxy's Python costs the engine's thread in one interpreter, with a stand-in for the GPU: no GPU needed.

  bash scripts/gpu/run.sh lock_cost
  bash scripts/gpu/run.sh lock_cost --sessions 256 --intervals-ms 5 0.1

The engine is ours, on a core whose steps do to the lock what vLLM's do: Python between many short calls that
release it, as every operator of torch does, and a wait for the GPU that releases it too. A step's batch is waited for
one step later, as with vLLM's asynchronous scheduling; `--synchronous` waits at once. Sessions come from other
processes through the real proxy (agent_clients.py) and are recorded on disk. One row per switch interval
(`sys.setswitchinterval`); "stretch" is a step's time over its time with the same requests and no proxy. It refuses to
say what a GPU does: it measures the lock only.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from agent_clients import Clients
from report import Report
from throughput import DEFAULT_TOKENIZER, build_client_session, build_lengths, find_words

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.vllm import VllmEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.tokens.load import load_renderer

COLUMNS = {
    "interval_ms": "switch interval (ms)",
    "calls_per_s": "calls/s",
    "step_ms": "step ms, mean",
    "step_p95_ms": "step ms, p95",
    "alone_ms": "alone",
    "stretch": "stretch",
    "other_cpu_share": "processor share of other threads",
    "added_p50_ms": "call beyond its steps, p50 ms",
}
NUM_OPERATORS = 60
"""Calls of a step that release the lock for some microseconds, as launches of kernels and copies do."""
SHORT, LONG = 1 << 13, 1 << 19
"""Elements of what is added to in such a call, and in the one of a step that takes as long as launching a graph."""


class StandInCore:
    """What `VllmEngine` uses of vLLM's `LLMEngine`, without a model.

    Args:
        word_ids: What is sampled, over and over.
        gpu_s: Of a step's batch.
        python_s: Of a step's Python.
    """

    def __init__(self, word_ids: Sequence[int], *, gpu_s: float, python_s: float, synchronous: bool) -> None:
        self.model_config = SimpleNamespace(max_model_len=1 << 20, dtype=torch.float32)
        self._word_ids = word_ids
        self._gpu_s, self._python_s, self._synchronous = gpu_s, python_s, synchronous
        self._left: dict[str, tuple[int, int]] = {}
        self._free_s = 0.0
        self._short, self._long = torch.zeros(SHORT), torch.zeros(LONG)
        self.steps: list[tuple[int, float]] = []
        """Requests and seconds of each step."""
        self.cpu_s = 0.0

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self._left[request_id] = (params.max_tokens, params.max_tokens)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def step(self) -> list[Any]:
        num_requests, begun_s, cpu_s = len(self._left), time.perf_counter(), time.thread_time()
        self._run_python()
        waited_for_s = self._free_s
        self._free_s = max(self._free_s, time.perf_counter()) + self._gpu_s
        rest_s = (self._free_s if self._synchronous else waited_for_s) - time.perf_counter()
        if rest_s > 0:
            time.sleep(rest_s)
        outputs = []
        for request_id, (total, left) in list(self._left.items()):
            if left > 1:
                self._left[request_id] = (total, left - 1)
                continue
            del self._left[request_id]
            outputs.append(self._build_output(request_id, total))
        self.steps.append((num_requests, time.perf_counter() - begun_s))
        self.cpu_s += time.thread_time() - cpu_s
        return outputs

    def _run_python(self) -> None:
        for _ in range(NUM_OPERATORS):
            end_s = time.thread_time() + self._python_s / NUM_OPERATORS
            while time.thread_time() < end_s:
                pass
            self._short.add_(1.0)
        self._long.add_(1.0)

    def _build_output(self, request_id: str, num_tokens: int) -> Any:
        token_ids = list(itertools.islice(itertools.cycle(self._word_ids), num_tokens))
        logprobs = SimpleNamespace(token_ids=token_ids, logprobs=[-0.5] * num_tokens)
        sampled = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason="length")
        return SimpleNamespace(request_id=request_id, finished=True, outputs=[sampled])


def measure_alone(core: StandInCore, num_requests: int, num_steps: int) -> float:
    """Seconds of a step with as many requests and no other thread at work."""
    params = GenerationParams(max_tokens=num_steps)
    for index in range(num_requests):
        core.add_request(f"alone-{index}", None, params)
    core.steps.clear()
    for _ in range(num_steps):
        core.step()
    return sum(seconds for _, seconds in core.steps[2:]) / (len(core.steps) - 2)


def measure(options: argparse.Namespace, renderer: Any, words: dict[str, int], interval_ms: float) -> dict[str, Any]:
    """One row."""
    core = StandInCore(
        list(words.values()),
        gpu_s=options.gpu_ms / 1000,
        python_s=options.python_ms / 1000,
        synchronous=options.synchronous,
    )
    alone_s = measure_alone(core, options.sessions, 200)
    core.steps.clear()
    engine = VllmEngine(SimpleNamespace(llm_engine=core))
    sys.setswitchinterval(interval_ms / 1000)
    num_calls = options.sessions * options.calls
    with (
        tempfile.TemporaryDirectory() as name,
        Proxy(engine, renderer, params=GenerationParams(max_tokens=1 << 16)) as proxy,
        Clients(Path(name), list(words), options.clients) as clients,
    ):
        logs, sessions = {}, []
        for number, lengths in enumerate(build_lengths("5k/30", options.sessions * 2, 1.0)):
            path = Path(name) / f"{number}.jsonl"
            logs[number] = SessionLog(session_id=str(number), task_id="t", group_id="g", path=path)
            key = proxy.open_session(logs[number], SessionLimits(max_calls=1 << 30)).api_key
            sessions.append(build_client_session(lengths, number, key, 1.0))
        core.cpu_s, process_s = 0.0, time.process_time()
        calls = clients.run(proxy.origin, sessions, options.sessions, num_calls)
        other_s = time.process_time() - process_s - core.cpu_s
    engine.close()
    seconds = max(call.ended_s for call in calls) - min(call.begun_s for call in calls)
    full = torch.tensor([at for count, at in core.steps if count > options.sessions // 2])
    step_s = float(full.mean())
    beyond = [
        call.ended_s - call.begun_s - len(logs[call.session].calls[call.index].completion.token_ids) * step_s
        for call in calls
    ]
    return {
        "calls_per_s": len(calls) / seconds,
        "step_ms": 1000 * step_s,
        "step_p95_ms": 1000 * float(full.quantile(0.95)),
        "alone_ms": 1000 * alone_s,
        "stretch": step_s / alone_s,
        "other_cpu_share": other_s / seconds,
        "added_p50_ms": 1000 * float(torch.tensor(beyond).median()),
    }


def main() -> None:
    options = read_options()
    report = Report("lock_cost", options.out, COLUMNS)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    words = find_words(tokenizer)
    renderer = load_renderer(tokenizer, str(options.tokenizer), family="template")
    before = sys.getswitchinterval()
    for interval_ms in options.intervals_ms:
        try:
            report.add(interval_ms=interval_ms, **measure(options, renderer, words, interval_ms))
        except Exception as error:  # noqa: BLE001 - reported, and the run ends with a failure
            report.fail(error, interval_ms=interval_ms)
        finally:
            sys.setswitchinterval(before)
    report.finish()


def read_options() -> argparse.Namespace:
    description, examples = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures (run.sh gives it)")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help=f"folder ({DEFAULT_TOKENIZER})")
    parser.add_argument("--sessions", type=int, default=128, help="at once (default 128)")
    parser.add_argument("--calls", type=int, default=3, help="per session (default 3)")
    parser.add_argument("--clients", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--gpu-ms", type=float, default=6.0, help="a batch's time on the GPU (default 6)")
    parser.add_argument("--python-ms", type=float, default=1.5, help="a step's Python (default 1.5)")
    parser.add_argument("--synchronous", action="store_true", help="wait for each batch in its own step")
    parser.add_argument("--intervals-ms", type=float, nargs="+", default=[5.0, 1.0, 0.5, 0.1, 0.05])
    return parser.parse_args()


if __name__ == "__main__":
    main()
