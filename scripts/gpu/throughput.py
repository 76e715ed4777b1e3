"""Measure tokens per second through proxy and engine, over those of offline vllm.LLM.generate.

  bash scripts/gpu/run.sh throughput --model 135m --tokenizer .cache/models/SmolLM2-135M-Instruct
  bash scripts/gpu/run.sh throughput --model 4b --concurrency 64 256 --calls 4 3 --repeat 3 --limit-s 540
  bash scripts/gpu/run.sh throughput --model 0.6b --concurrency 64 --calls 4 --variants now 5ms
  bash scripts/gpu/run.sh throughput --model tiny --concurrency 2 4 --calls 3 --session-calls 5      # a CPU

Both sides use one `LLM` in one process. "Proxy" is HTTP from other processes (OpenAI's Chat API), so many sessions at
once, each asking again as soon as it has its answer, in lengths of agents' sessions (session_lengths.py, "5k/30"; one
that ends is followed by the next). "Offline" is `LLM.generate` with exactly the prompt ids that the proxy's side gave
to the engine, in that order, each with as many sampled tokens.

What makes offline a strong baseline: it has all prompts in one list, so that it never waits for a request, and its
scheduler runs as many at a time as there were sessions (more would answer another question). The weights are random
but for the embedding and the last layer, which make every word be followed by one certain other word: both sides then
sample the same ids, and offline finds in its prefix cache what the proxy's side found in its own. Real sampling would
make it compute every earlier answer again. Words are no stop tokens: the requests' max_tokens end the calls.

Two ratios. "whole" is all tokens over all seconds of either side: offline begins with admitting all prompts while the
GPU stands still, the sessions with all first prompts arriving in one moment, and both end with fewer requests than
slots. "steady" leaves all of that out: tokens of the steps from the end of the first requests, as many as there are
slots, to the end of the last but so many.

With --repeat, everything is measured so many times in turns, and a row's figures are medians. Variants (--variants)
share the offline side of their turn; variants.py has them.

"Added" is a call's time at its client without its time between `generate` and the step that ended it; that of first
calls, which arrive together and are encoded from scratch, stands beside it (p50). "Hit" is the
share of prompt tokens that came from the prefix cache. A separate session of 40 calls, at a quarter of the lengths,
gives both at one session at once. "Mixed" steps compute prompts too; what the collector took is that of the engine's
thread only. The file has more of the kind: waits and page faults per step, requests in its batch.
"""

import argparse
import gc
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from agent_clients import Clients, ClientSession
from engine_watch import EngineWatch, Side, WatchedEngine, build_key, find_busy
from report import Report
from session_lengths import TASK_TOKENS, SessionLengths, build_sessions
from variants import changed
from word_chain import MAX_MODEL_LEN, MODELS, chain_words, find_words, write_model

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import set_environment
from polar_trl.engine.cuda_graphs import LLM_KWARGS, require_safe_graphs
from polar_trl.engine.vllm import VllmEngine, build_sampling_params
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.types import Call

CONCURRENCY = (8, 64, 256)
DEFAULT_TOKENIZER = Path(".cache/models/SmolLM2-135M-Instruct")
SESSION_SCALE = 0.25
SESSIONS_PER_CLIENT = 64
COLUMNS = {
    "model": "model",
    "sessions": "sessions at once",
    "variant": "variant",
    "repeats": "rows",
    "calls": "calls",
    "prompt_tokens": "prompt tokens per call",
    "proxy_tokens_per_s": "proxy tok/s",
    "offline_tokens_per_s": "offline tok/s",
    "whole_ratio": "ratio, whole",
    "steady_ratio": "ratio, steady",
    "added_p50_ms": "added p50 ms",
    "added_p95_ms": "added p95 ms",
    "first_added_p50_ms": "first calls",
    "proxy_hit": "hit, proxy",
    "offline_hit": "hit, offline",
    "same_ids_share": "same ids",
    "proxy_step_ms": "step ms, proxy",
    "offline_step_ms": "step ms, offline",
    "proxy_waiting": "thread outside of steps, proxy",
    "proxy_mixed_share": "mixed steps, proxy",
    "offline_mixed_share": "mixed steps, offline",
    "proxy_plain_cpu_ms": "CPU ms of other steps, proxy",
    "offline_plain_cpu_ms": "CPU ms of other steps, offline",
    "proxy_gc_share": "collector's share, proxy",
    "offline_gc_share": "collector's share, offline",
    "proxy_step_system_ms": "system's CPU ms per step, proxy",
    "offline_step_system_ms": "system's, offline",
    "threaded_step_ms": "step ms, offline in a thread",
}


class Bench:
    """One engine, one proxy, and what is measured on them."""

    def __init__(
        self, llm: Any, renderer: Any, words: Sequence[str], folder: Path, device: torch.device | None
    ) -> None:
        self._llm = llm
        self._words = words
        self._folder = folder
        self._watch = EngineWatch(llm.llm_engine)
        self._engine = VllmEngine(llm, device=device)
        self._watched = WatchedEngine(self._engine)
        self._proxy = Proxy(self._watched, renderer, params=GenerationParams(max_tokens=MAX_MODEL_LEN))
        self._proxy.start()
        self._num_sessions = 0

    def close(self) -> None:
        self._proxy.stop()
        self._engine.close()
        self._watch.close()

    def warm_up(self) -> None:
        """Kernels, caches and imports of both sides, outside of the clock."""
        calls, _ = self._run_proxy_side(build_lengths("5k/30", 8, 0.1), 4, 12, 0.1)
        self._run_offline_side(calls, 4)

    def measure(
        self, num_slots: int, calls_per_slot: int, scale: float, variants: Sequence[str], *, threaded: bool
    ) -> list[dict[str, Any]]:
        """A row per variant: both sides with so many sessions at once, and offline again in a thread of its own."""
        num_calls = num_slots * calls_per_slot
        # sessions end after some 27 calls and are followed by others
        lengths = build_lengths("5k/30", num_slots * (calls_per_slot // 15 + 2), scale)
        rows = []
        for variant in variants:
            with changed(variant, self._engine._thread.native_id or 0):
                calls, row = self._run_proxy_side(lengths, num_slots, num_calls, scale)
            rows.append(row | {"variant": variant})
        # of the last variant's prompts: the others' differ in their words only
        offline, num_same = self._run_offline_side(calls, num_slots)
        shared = offline.describe("offline") | {"same_ids_share": num_same / num_calls}
        if threaded:
            sides: list[Side] = []
            thread = threading.Thread(target=lambda: sides.append(self._run_offline_side(calls, num_slots)[0]))
            thread.start()
            thread.join()
            shared |= sides[0].describe("threaded")
        for row in rows:
            row |= shared
            row |= {
                "whole_ratio": row["proxy_tokens_per_s"] / row["offline_tokens_per_s"],
                "steady_ratio": row["proxy_steady_tokens_per_s"] / row["offline_steady_tokens_per_s"],
            }
        return rows

    def measure_session(self, num_calls: int, scale: float) -> dict[str, Any]:
        """One session on its own: hit rate and added time."""
        calls, row = self._run_proxy_side(build_lengths("20k/40", 1, scale), 1, num_calls, scale)
        ordered = sorted(calls, key=lambda call: call.index)
        # what was computed before: the last call's prompt and answer, but for the last sampled token
        computed = sum(len(call.prompt_ids) + len(call.completion.token_ids) - 1 for call in ordered[:-1])
        return row | {"hit_of_what_was_computed": row["proxy_cached_tokens"] / computed}

    def _run_proxy_side(
        self, lengths: Sequence[SessionLengths], num_slots: int, num_calls: int, scale: float
    ) -> tuple[list[Call], dict[str, Any]]:
        """Its calls in the order in which the engine got them, and the row's figures of them."""
        sessions, logs = self._open_sessions(lengths, scale)
        with Clients(self._folder, self._words, max(1, min(4, num_slots // SESSIONS_PER_CLIENT))) as clients:
            self._prepare(num_slots)
            cpu_s = time.process_time()
            times = clients.run(self._proxy.origin, sessions, num_slots, num_calls)
            cpu_s = time.process_time() - cpu_s
        for session in sessions:
            self._proxy.close_session(session.api_key)
        submitted, ended = self._watched.submitted, self._watch.ended
        recorded = {(number, call.index): call for number, log in logs.items() for call in log.calls}
        pairs = [(recorded[at.session, at.index], at) for at in times]
        pairs.sort(key=lambda pair: submitted[build_key(pair[0].prompt_ids)])
        calls = [call for call, _ in pairs]
        side = Side(
            begun_s=min(at.begun_s for at in times),
            ended_s=max(at.ended_s for at in times),
            busy_s=find_busy((at for at, _ in ended.values()), num_slots),
            process_cpu_s=cpu_s,
            steps=self._watch.steps,
            num_cached_tokens=sum(cached for _, cached in ended.values()),
            num_prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        )
        added: dict[bool, list[float]] = {True: [], False: []}
        for call, at in pairs:
            key = build_key(call.prompt_ids)
            added[call.index == 0].append(1000 * (at.ended_s - at.begun_s - (ended[key][0] - submitted[key])))
        p50, p95 = torch.tensor(added[False]).quantile(torch.tensor([0.5, 0.95])).tolist()
        row = {
            "sessions": num_slots,
            "calls": num_calls,
            "prompt_tokens": side.num_prompt_tokens // num_calls,
            "sampled_tokens": sum(len(call.completion.token_ids) for call in calls),
            "added_p50_ms": p50,
            "added_p95_ms": p95,
            "first_added_p50_ms": float(torch.tensor(added[True]).median()),
            "prompts_rendered_anew": sum(call.parent is None and call.index > 0 for call in calls),
            "stopped_early": sum(call.completion.finish_reason != "length" for call in calls),
        }
        return calls, row | side.describe("proxy")

    def _run_offline_side(self, calls: Sequence[Call], num_slots: int) -> tuple[Side, int]:
        """The side, and how many answers have the very ids of the proxy's."""
        prompts = [{"prompt_token_ids": list(call.prompt_ids)} for call in calls]
        params = [build_offline_params(len(call.completion.token_ids)) for call in calls]
        self._prepare(num_slots)
        with self._engine.paused():
            begun_s, cpu_s = time.monotonic(), time.process_time()
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
        side = Side(
            begun_s=begun_s,
            ended_s=ended_s,
            busy_s=find_busy((at for at, _ in self._watch.ended.values()), num_slots),
            process_cpu_s=cpu_s,
            steps=self._watch.steps,
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            num_prompt_tokens=sum(len(call.prompt_ids) for call in calls),
        )
        pairs = zip(outputs, calls, strict=True)
        return side, sum(tuple(output.outputs[0].token_ids) == call.completion.token_ids for output, call in pairs)

    def _open_sessions(
        self, lengths: Sequence[SessionLengths], scale: float
    ) -> tuple[list[ClientSession], dict[int, SessionLog]]:
        sessions, logs = [], {}
        for one in lengths:
            self._num_sessions += 1
            number, name = self._num_sessions, f"session-{self._num_sessions}"
            # recorded on disk, as in training
            log = SessionLog(session_id=name, task_id="t", group_id="g", path=self._folder / f"{name}.jsonl")
            endpoint = self._proxy.open_session(log, SessionLimits(max_calls=1 << 30))
            logs[number] = log
            sessions.append(build_client_session(one, number, endpoint.api_key, scale))
        return sessions, logs

    def _prepare(self, num_slots: int) -> None:
        """The same start for either side: nothing cached, as many requests at a time as there are slots."""
        gc.collect()
        with self._engine.paused():
            self._llm.reset_prefix_cache()
            scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            for name in ("max_num_running_reqs", "max_num_active_reqs"):  # newer versions of vLLM admit by the second
                if hasattr(scheduler, name):
                    setattr(scheduler, name, num_slots)
        self._watched.submitted = {}
        self._watch.clear()


def build_lengths(name: str, num_sessions: int, scale: float) -> list[SessionLengths]:
    """Sessions with tasks of their own, each ending where the model's length does."""
    fitting = []
    for session in build_sessions(name, num_groups=num_sessions, group_size=1, scale=scale):
        # the chat template adds a few tokens to every message
        calls = [
            (prompt, sampled)
            for index, (prompt, sampled) in enumerate(session.calls)
            if prompt + sampled + 20 * (index + 2) < MAX_MODEL_LEN
        ]
        fitting.append(replace(session, calls=tuple(calls)))
    return fitting


def build_client_session(lengths: SessionLengths, number: int, api_key: str, scale: float) -> ClientSession:
    task_words = max(1, round(TASK_TOKENS * scale))
    prompts = [prompt for prompt, _ in lengths.calls]
    followings = [*prompts[1:], sum(lengths.calls[-1]) + 1]
    calls = [
        (sampled, following - prompt - sampled)
        for (prompt, sampled), following in zip(lengths.calls, followings, strict=True)
    ]
    return ClientSession(
        number=number, api_key=api_key, shared_words=prompts[0] - task_words, task_words=task_words, calls=calls
    )


def build_offline_params(num_tokens: int) -> Any:
    """Build what the engine would ask for so many tokens."""
    params = build_sampling_params(GenerationParams(max_tokens=num_tokens))
    params.ignore_eos = True
    return params


def build_llm(folder: Path, options: argparse.Namespace) -> Any:
    """As the trainer builds it, but for the weights."""
    on_gpu = torch.cuda.is_available()
    kwargs: dict[str, Any] = {"gpu_memory_utilization": options.gpu_memory_utilization}
    if not on_gpu:
        from polar_trl.engine import vllm_cpu

        vllm_cpu.keep_weights_loadable()
        kwargs = dict(vllm_cpu.LLM_KWARGS)
    kwargs |= LLM_KWARGS[options.cuda_graphs]
    from vllm import LLM

    return LLM(
        model=str(folder),
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max(options.concurrency),
        max_num_batched_tokens=4096,
        seed=0,
        logprobs_mode="processed_logprobs",
        **kwargs,
    )


def main() -> None:
    options = read_options()
    # every session has a connection and a record
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report("throughput", options.out / options.model, COLUMNS)
    set_environment(cpu=not torch.cuda.is_available())
    from transformers import AutoTokenizer

    from polar_trl.tokens.load import load_renderer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    words = find_words(tokenizer)
    renderer = load_renderer(tokenizer, str(options.tokenizer), family="template")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.model, options.tokenizer, len(tokenizer))
        llm = build_llm(folder, options)
        chain_words(llm, list(words.values()), len(tokenizer), MODELS[options.model]["sizes"]["hidden_size"])
        scheduler_config = llm.llm_engine.vllm_config.scheduler_config
        report.note(
            model=options.model,
            async_scheduling=bool(scheduler_config.async_scheduling),
            cudagraph_mode=require_safe_graphs(llm.llm_engine.vllm_config),
            scale=options.scale,
        )
        report.say("the engine stands")
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        bench = Bench(llm, renderer, list(words), folder, device)
        try:
            bench.warm_up()
            report.say("warm")
            run_rows(bench, report, options)
        finally:
            bench.close()
    report.finish()


def run_rows(bench: "Bench", report: Report, options: argparse.Namespace) -> None:
    """Each row on its own: one that fails leaves the others."""
    model = {"model": options.model}
    if options.session_calls:
        try:
            row = bench.measure_session(options.session_calls, SESSION_SCALE * options.scale)
            report.add(**model, **row)
        except Exception as error:  # noqa: BLE001 - reported, and the run ends with a failure
            report.fail(error, **model, sessions=1)
    singles: list[dict[str, Any]] = []
    turn_s = 0.0
    for turn in range(options.repeat):
        begun_s = report.elapsed_s
        if begun_s + turn_s > options.limit_s:
            break
        for num_slots, calls_per_slot in zip(options.concurrency, options.calls, strict=True):
            # in another order each time
            shift = turn % len(options.variants)
            variants = options.variants[shift:] + options.variants[:shift]
            try:
                rows = bench.measure(num_slots, calls_per_slot, options.scale, variants, threaded=options.threaded)
            except Exception as error:  # noqa: BLE001 - the same
                report.fail(error, **model, sessions=num_slots)
                continue
            for row in rows:
                ratios = f"whole {row['whole_ratio']:.3f}, steady {row['steady_ratio']:.3f}"
                added = f"added {row['added_p50_ms']:.1f} / {row['added_p95_ms']:.1f} ms"
                report.say(f"{num_slots} sessions, {row['variant']}: {ratios}, {added}")
            singles += rows
            report.note(single_rows=singles)
        turn_s = report.elapsed_s - begun_s
    for num_slots in options.concurrency:
        for variant in options.variants:
            rows = [row for row in singles if (row["sessions"], row["variant"]) == (num_slots, variant)]
            if rows:
                report.add(**model, **take_medians(rows))


def take_medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's median, and how many rows there were."""
    figures = {
        name: value if isinstance(value, str) else statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
    }
    return figures | {"repeats": len(rows)}


def read_options() -> argparse.Namespace:
    description, examples = __doc__.split("\n", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures (run.sh gives it)")
    parser.add_argument("--model", choices=MODELS, default="135m", help="sizes of the random model (default 135m)")
    parser.add_argument(
        "--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help=f"folder (default {DEFAULT_TOKENIZER})"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY), help="sessions at once")
    parser.add_argument("--calls", type=int, nargs="+", help="calls per session at each of them, at least 3")
    parser.add_argument("--scale", type=float, help="factor of all lengths")
    parser.add_argument(
        "--session-calls", type=int, default=40, help="calls of the session on its own (default 40; 0: none)"
    )
    parser.add_argument("--repeat", type=int, default=1, help="rows that a figure is the median of (default 1)")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no turn that would end later than this")
    parser.add_argument("--variants", nargs="+", default=["now"], help="what to compare (default: now)")
    parser.add_argument("--cuda-graphs", choices=LLM_KWARGS, default="default", help="as engine_cuda_graphs")
    parser.add_argument(
        "--threaded", action="store_true", help="run offline in a thread too: tells the thread's cost from the proxy's"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    options = parser.parse_args()
    model = MODELS[options.model]
    options.calls = options.calls or list(model["calls"])
    options.scale = options.scale or model["scale"]
    if len(options.calls) == 1:
        options.calls *= len(options.concurrency)
    if len(options.calls) != len(options.concurrency):
        parser.error(f"--calls: {len(options.calls)} numbers for the {len(options.concurrency)} of --concurrency")
    if min(options.concurrency) < 1 or min(options.calls) < 3 or options.session_calls not in (0, *range(3, 41)):
        parser.error("--concurrency must be at least 1, --calls at least 3, --session-calls 0 or 3 to 40")
    if not (options.tokenizer / "tokenizer_config.json").is_file():
        parser.error(f"--tokenizer: {options.tokenizer} holds no tokenizer; scripts/dev/get_model.py makes one")
    return options


if __name__ == "__main__":
    main()
