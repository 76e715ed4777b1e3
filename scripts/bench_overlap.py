#!/usr/bin/env python3
"""Rollouts that overlap with training on several ranks: a simulation on a simulated clock of how busy the engines are.

    python scripts/bench_overlap.py [--ranks 8] [--json FILE] [--steps 12] [--kv-tokens 2500000] [--real MODEL]

Which groups a step takes, which rank begins which session, which calls wait at the gate, and who is a straggler are
decided by the package's own code (`choose_groups`, `JobQueues`, `Gate`, `StragglerCut`). The engine of each rank is a
model of continuous batching: `slots` sequences decode together, a step of n of them takes
`step_s + n * step_s_per_sequence`; prefill goes first and stops decoding; a prefix cache of `kv_tokens` (least
recently used goes first) is emptied when the weights change, so that a held session's whole history is prefilled
again. Every setting draws the same sessions.

Two figures of how busy engines are, both of the time in which rollouts are made (from the release of the weights to
the last call before they change), mean over ranks: "slots" is the share of slots in use, "sampling" the share of time
in which at least one is, as a GPU's own utilization counts. The JSON's busy_lagN are "sampling" of the best setting
with that lag; slots_lagN are its "slots".

`--real MODEL` runs small settings with the trainer on 2 and 4 real ranks (`scripts/bench/overlap_real.py`; MODEL's
tokenizer, tiny random weights) and compares.
"""

import argparse
import asyncio
import heapq
import json
import math
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from polar_trl.engine.gate import Gate, GateStats
from polar_trl.rollout.ranks import JobQueues, claim_oldest
from polar_trl.rollout.runner import REPORT_INTERVAL_S
from polar_trl.rollout.staleness import GroupState, choose_groups
from polar_trl.rollout.stragglers import StragglerCut


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run. Times in seconds, lengths in tokens; pairs are median and sigma of a log-normal distribution."""

    name: str
    num_ranks: int
    agents_per_slot: float
    max_policy_lag: int
    straggler_quantile: float | None = None
    steps: int
    seed: int
    kv_tokens: int
    groups_per_rank: float = 8
    group_size: int = 8
    slots: int = 16
    step_s: float = 0.008
    step_s_per_sequence: float = 0.0009
    prefill_tokens_per_s: float = 25_000.0
    train_tokens_per_s: float = 14_000.0
    sync_s: float = 8.0
    report_s: float = REPORT_INTERVAL_S
    prompt_tokens: int = 5_000
    observed_tokens: int = 700
    calls: tuple[float, float] = (26.0, 0.6)
    sampled_tokens: tuple[float, float] = (220.0, 0.8)
    tool_s: tuple[float, float] = (4.0, 1.2)
    prepare_s: tuple[float, float] = (1.0, 0.5)
    grade_s: tuple[float, float] = (15.0, 0.7)
    max_preparing: int = 4
    max_grading: int = 8
    slower: float = 0.0
    """The most by which a tool is slower than drawn, as a share; another draw for each `repeat`."""
    repeat: int = 0

    @property
    def num_groups(self) -> int:
        """Of a step, on all ranks."""
        return round(self.groups_per_rank * self.num_ranks)

    @property
    def max_agents(self) -> int:
        """Of each rank."""
        return round(self.agents_per_slot * self.slots)

    @property
    def num_open(self) -> int:
        """Batches that are open at once: the trainer knows its data one batch ahead."""
        return min(2, 1 + self.max_policy_lag)


class SkippingSelector(selectors.DefaultSelector):
    """A clock for asyncio: where nothing is ready, it goes on to the next timer at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits"
        self.now += timeout
        return []


def run_on_simulated_clock(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it to its end; what it has left running is cancelled."""
    clock = SkippingSelector()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(coroutine)


class SlotClock:
    """Seconds of slots in use, and of those with at least one in use."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._num_used, self._since = 0, now()
        self.slot_seconds = self.sampling_seconds = 0.0

    def add(self, change: int) -> None:
        """So many more slots are in use from now on."""
        now = self._now()
        self.slot_seconds += (now - self._since) * self._num_used
        self.sampling_seconds += (now - self._since) * (self._num_used > 0)
        self._num_used, self._since = self._num_used + change, now


@dataclass(slots=True, eq=False)
class Request:
    """One call inside the engine."""

    session: int
    context: int
    """Tokens of the prompt."""
    sampled: int
    done: asyncio.Future[None]


class Engine:
    """Continuous batching with a prefix cache."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Request] = deque()
        self._prefill: deque[tuple[Request, int]] = deque()
        self._running: list[tuple[float, int, Request]] = []
        """Heap by the decoding step at which it ends."""
        self._num_steps = 0.0
        self._cache: OrderedDict[int, int] = OrderedDict()
        """Session -> tokens kept, least recently used first; of those that run, too."""
        self._wake = asyncio.Event()
        self.clock = SlotClock(self._loop.time)
        self.sampled_tokens = self.prefilled_tokens = 0

    async def sample(self, session: int, context: int, sampled: int) -> None:
        """Wait for an answer of so many tokens to a prompt of `context` tokens."""
        request = Request(session, context, sampled, self._loop.create_future())
        self._queue.append(request)
        self._admit()
        self._wake.set()
        await request.done

    def forget(self) -> None:
        """The weights change."""
        self._cache.clear()

    async def serve(self) -> None:
        """Prefill and decode for ever."""
        while True:
            self._admit()
            if self._prefill:
                request, new = self._prefill[0]
                await asyncio.sleep(new / self._setting.prefill_tokens_per_s)
                self._prefill.popleft()
                heapq.heappush(self._running, (self._num_steps + request.sampled, request.session, request))
            else:
                await self._decode()

    async def _decode(self) -> None:
        """Until a sequence ends or another comes."""
        self._wake.clear()
        begun = self._loop.time()
        step_s = self._setting.step_s + self._setting.step_s_per_sequence * len(self._running)
        timer = None
        if self._running:
            timer = self._loop.call_later((self._running[0][0] - self._num_steps) * step_s, self._wake.set)
        await self._wake.wait()
        if timer is not None:
            timer.cancel()
        self._num_steps += (self._loop.time() - begun) / step_s
        while self._running and self._running[0][0] <= self._num_steps + 1e-6:
            _, _, request = heapq.heappop(self._running)
            self.sampled_tokens += request.sampled
            self.clock.add(-1)
            request.done.set_result(None)

    def _admit(self) -> None:
        while self._queue and len(self._prefill) + len(self._running) < self._setting.slots:
            request = self._queue.popleft()
            self.clock.add(+1)
            new = request.context - min(self._cache.pop(request.session, 0), request.context)
            self._cache[request.session] = request.context + request.sampled
            self.prefilled_tokens += new
            self._prefill.append((request, new))
            self._evict()

    def _evict(self) -> None:
        """Down to what fits; what is in a slot stays."""
        too_many = sum(self._cache.values()) - self._setting.kv_tokens
        if too_many <= 0:
            return
        kept = {request.session for request, _ in self._prefill} | {request.session for _, _, request in self._running}
        for session in [session for session in self._cache if session not in kept]:
            if too_many <= 0:
                return
            too_many -= self._cache.pop(session)


@dataclass(slots=True, eq=False)
class Session:
    """A session's fate, drawn beforehand, and what became of it."""

    number: int
    group: int
    sampled: list[int]
    tools_s: list[float]
    prepare_s: float
    grade_s: float
    versions: Counter[int] = field(default_factory=Counter)
    """Policy version -> tokens sampled under it."""
    context: int = 0
    was_cut: bool = False
    ended_s: float = math.inf


class SharedCounters:
    """Implements what claims need of `Ranks`: one simulated rank of several."""

    def __init__(self, rank: int, num_ranks: int, counters: Counter[str]) -> None:
        self.rank, self.num_ranks, self._counters = rank, num_ranks, counters

    def add(self, name: str, amount: int) -> int:
        """Add to a counter of all ranks."""
        self._counters[name] += amount
        return self._counters[name]


class Rank:
    """One process: its engine and gate, its stages, and the jobs that it sees waiting."""

    def __init__(self, setting: Setting, number: int, counters: Counter[str], capacity: int | None) -> None:
        self.engine = Engine(setting)
        self.gate = Gate(capacity)
        self.preparing = asyncio.Semaphore(setting.max_preparing)
        self.agents = asyncio.Semaphore(setting.max_agents)
        self.grading = asyncio.Semaphore(setting.max_grading)
        self.ranks: Any = SharedCounters(number, setting.num_ranks, counters)
        self.waiting: list[JobQueues[tuple[Session, StragglerCut]]] = []
        self.num_free = setting.max_agents + setting.max_preparing


class Run:
    """One setting, from the first session to the last step.

    Args:
        capacity: Tokens of histories by which the gate admits sessions; None lets all through.
    """

    def __init__(self, setting: Setting, capacity: int | None = None) -> None:
        self.setting = setting
        self._capacity = capacity
        self._version = 0
        self._open: dict[int, list[Session]] = {}
        self._num_running: Counter[int] = Counter()
        """Sessions of a group that have not ended."""
        self.num_started = self.num_moved = self.num_cut = 0
        self._lags: Counter[int] = Counter()
        self._rows: list[dict[str, float]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> dict[str, Any]:
        """Return the figures of all steps but the first."""
        run_on_simulated_clock(self._train())
        return self._summarize()

    async def _train(self) -> None:
        """Do what the trainers do, step by step."""
        setting, counters, now = self.setting, Counter[str](), asyncio.get_running_loop().time
        self.ranks = [Rank(setting, number, counters, self._capacity) for number in range(setting.num_ranks)]
        for rank in self.ranks:
            self._spawn(rank.engine.serve())
        self._ended = asyncio.Event()
        for _ in range(setting.num_open):
            self._start_batch()
        for _ in range(setting.steps):
            before = self._mark()
            while (taken := self._choose()) is None:
                self._ended.clear()
                await self._ended.wait()
                if setting.num_ranks > 1:  # they look at each other's reports every so often
                    await asyncio.sleep(-(now() - before["now"]) % setting.report_s)
            waited = now()
            await asyncio.gather(*(rank.gate.hold() for rank in self.ranks))
            after = self._mark()
            sessions = [session for group in taken for session in self._open.pop(group)]
            for session in sessions:
                for version, count in session.versions.items():
                    self._lags[self._version - version] += count
            self.num_cut += sum(session.was_cut for session in sessions)
            num_tokens = sum(session.context for session in sessions) / setting.num_ranks
            await asyncio.sleep(setting.sync_s + num_tokens / setting.train_tokens_per_s)
            self._version += 1
            for rank in self.ranks:
                rank.engine.forget()
                rank.gate.release()
            self._start_batch()
            trained = sum(sum(session.versions.values()) for session in sessions)
            more = {"drain_s": after["now"] - waited, "step_s": now() - before["now"], "trained_tokens": trained}
            self._rows.append({name: after[name] - before[name] for name in after} | more)

    def _mark(self) -> dict[str, float]:
        engines = [rank.engine for rank in self.ranks]
        for engine in engines:
            engine.clock.add(0)
        return {
            "now": asyncio.get_running_loop().time(),
            "slot_seconds": sum(engine.clock.slot_seconds for engine in engines),
            "sampling_seconds": sum(engine.clock.sampling_seconds for engine in engines),
            "sampled_tokens": sum(engine.sampled_tokens for engine in engines),
            "prefilled_tokens": sum(engine.prefilled_tokens for engine in engines),
        }

    def _choose(self) -> list[int] | None:
        groups = list(self._open)
        if sum(self._num_running[group] == 0 for group in groups) < self.setting.num_groups:
            return None
        states = [
            GroupState(
                first_policy_version=min((v for session in sessions for v in session.versions), default=None),
                finished_s=None if self._num_running[group] else max(session.ended_s for session in sessions),
            )
            for group, sessions in self._open.items()
        ]
        places = choose_groups(
            states, self.setting.num_groups, version=self._version, max_policy_lag=self.setting.max_policy_lag
        )
        return None if places is None else [groups[place] for place in places]

    def _start_batch(self) -> None:
        setting = self.setting
        cut = StragglerCut(setting.num_groups * setting.group_size, setting.straggler_quantile)
        name, jobs = f"batch-{self.num_started}", []
        for _ in range(setting.num_groups):
            group = self.num_started // setting.group_size
            self._open[group] = [draw_session(setting, self.num_started + i) for i in range(setting.group_size)]
            self.num_started += setting.group_size
            self._num_running[group] = setting.group_size
            jobs += [(session, cut) for session in self._open[group]]
        for rank in self.ranks:
            rank.waiting.append(JobQueues(rank.ranks, name, jobs))
            self._begin_sessions(rank)
        for rank in self.ranks:
            for queues in rank.waiting:
                queues.is_shared = True
            self._begin_sessions(rank)

    def _begin_sessions(self, rank: Rank) -> None:
        while rank.num_free and (claimed := claim_oldest(rank.waiting)) is not None:
            rank.num_free -= 1
            session, cut = claimed
            share = self.setting.num_groups * self.setting.group_size // self.setting.num_ranks
            self.num_moved += session.number // share % self.setting.num_ranks != rank.ranks.rank
            self._spawn(self._run_session(rank, session, cut))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_session(self, rank: Rank, session: Session, cut: StragglerCut) -> None:
        """Do what `SessionRun` does, without the agent."""
        async with rank.preparing:
            await asyncio.sleep(session.prepare_s)
        async with rank.agents:
            cut.note(await self._run_agent(rank, session, cut))
        rank.num_free += 1
        self._begin_sessions(rank)
        async with rank.grading:
            await asyncio.sleep(session.grade_s)
        session.ended_s = asyncio.get_running_loop().time()
        self._num_running[session.group] -= 1
        self._ended.set()

    async def _run_agent(self, rank: Rank, session: Session, cut: StragglerCut) -> float:
        """Return the agent's own time."""
        setting, now, gate_stats = self.setting, asyncio.get_running_loop().time, GateStats()
        begun, held_s = now(), 0.0
        session.context = setting.prompt_tokens
        for sampled, tool_s in zip(session.sampled, session.tools_s, strict=True):
            asked, first_id = now(), session.number * 1_000_000  # no session shares its prompt here
            prompt_ids: Any = range(first_id, first_id + session.context)
            async with rank.gate.passing(gate_stats, prompt_ids):
                held_s += now() - asked
                session.versions[self._version] += sampled
                await rank.engine.sample(session.number, session.context, sampled)
            session.context += sampled
            # the agent may be cut while its tool runs; one that is cut within a call is cut after it here
            left_s = cut.limit_s - (now() - begun - held_s)
            session.was_cut = left_s <= tool_s
            await asyncio.sleep(max(0.0, min(left_s, tool_s)))
            if session.was_cut:
                break
            session.context += setting.observed_tokens
        rank.gate.forget(gate_stats)
        return now() - begun - held_s

    def _summarize(self) -> dict[str, Any]:
        rows = self._rows[1:]  # the first step has no step before it to overlap with
        total = {name: sum(row[name] for row in rows) for name in rows[0]}
        ranks, slots, steps = self.setting.num_ranks, self.setting.slots, len(rows)
        return {
            "name": self.setting.name,
            "seconds_per_step": total["step_s"] / steps,
            "rollout_s": total["now"] / steps,
            "drain_s": total["drain_s"] / steps,
            "slots_in_rollout": total["slot_seconds"] / (ranks * slots * total["now"]),
            "sampling_in_rollout": total["sampling_seconds"] / (ranks * total["now"]),
            "trained_tokens_per_s": total["trained_tokens"] / total["step_s"],
            "prefilled_per_sampled": total["prefilled_tokens"] / total["sampled_tokens"],
            "moved": self.num_moved / self.num_started,
            "stragglers": self.num_cut,
            "policy_lag": share_lags(self._lags),
        }


def share_lags(lags: Counter[int]) -> dict[str, float]:
    """Return the share of tokens of each policy lag."""
    return {str(lag): count / lags.total() for lag, count in sorted(lags.items())}


def draw_session(setting: Setting, number: int) -> Session:
    """Draw a session by its number: the same for every setting."""
    generator = random.Random(f"{setting.seed}-{number}")

    def draw(distribution: tuple[float, float]) -> float:
        return generator.lognormvariate(math.log(distribution[0]), distribution[1])

    slower = random.Random(f"{setting.repeat}-{number}")
    num_calls = max(1, min(200, round(draw(setting.calls))))
    return Session(
        number=number,
        group=number // setting.group_size,
        sampled=[max(1, min(8_192, round(draw(setting.sampled_tokens)))) for _ in range(num_calls)],
        tools_s=[draw(setting.tool_s) * (1.0 + setting.slower * slower.random()) for _ in range(num_calls)],
        prepare_s=draw(setting.prepare_s),
        grade_s=draw(setting.grade_s),
    )


def build_settings(
    num_ranks: int, steps: int, seed: int, kv_tokens: int, *, groups_per_rank: float, times: Sequence[float]
) -> list[Setting]:
    """Return settings with and without carry-over, at so many `times` agents per slot, and with stragglers cut."""
    build = partial(
        Setting, num_ranks=num_ranks, steps=steps, seed=seed, kv_tokens=kv_tokens, groups_per_rank=groups_per_rank
    )
    settings = [
        build(name=f"{number:g}x, lag {lag}", agents_per_slot=number, max_policy_lag=lag)
        for lag in (0, 1, 2)
        for number in times
    ]
    cut: dict[str, Any] = {"agents_per_slot": 4, "straggler_quantile": 0.9}
    return settings + [build(name=f"4x, lag {lag}, cut at 0.9", max_policy_lag=lag, **cut) for lag in (0, 1)]


def build_small_settings(num_ranks: int, seed: int, scale: float, steps: int = 20) -> list[Setting]:
    """Return what real ranks can imitate within minutes; a group of 4 lies on two of them.

    Args:
        scale: Real seconds of one of the setting's.
    """
    build = partial(
        Setting,
        num_ranks=num_ranks,
        steps=steps,
        seed=seed,
        groups_per_rank=1.5,
        group_size=4,
        slots=3,
        max_preparing=1,
        kv_tokens=10**9,
        prefill_tokens_per_s=math.inf,
        step_s=0.022,
        step_s_per_sequence=0.0,
        train_tokens_per_s=3_000.0,
        report_s=REPORT_INTERVAL_S / scale,
        calls=(4.0, 0.5),
        sampled_tokens=(220.0, 0.5),
        tool_s=(4.0, 0.8),
        grade_s=(8.0, 0.5),
    )
    return [
        build(name=f"{num_ranks} ranks, {times}x, lag {lag}", agents_per_slot=times, max_policy_lag=lag)
        for lag, times in ((1, 2), (0, 1))
    ]


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "agents per slot, lag": lambda result: str(result["name"]),
    "s per step": lambda result: f"{result['seconds_per_step']:.0f}",
    "of it rollout": lambda result: f"{result['rollout_s']:.0f}",
    "drain": lambda result: f"{result['drain_s']:.0f}",
    "slots": lambda result: f"{result['slots_in_rollout']:.0%}",
    "sampling": lambda result: f"{result['sampling_in_rollout']:.1%}",
    "tokens/s": lambda result: f"{result['trained_tokens_per_s']:.0f}",
    "prefilled per sampled": lambda result: f"{result['prefilled_per_sampled']:.1f}",
    "moved": lambda result: f"{result['moved']:.0%}",
    "cut": lambda result: str(result["stragglers"]),
    "lag of trained tokens": lambda result: ", ".join(
        f"{k}: {share:.0%}" for k, share in result["policy_lag"].items()
    ),
}
COMPARED = {"seconds_per_step": "s per step", "slots_in_rollout": "slots"}


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table, each row as it comes."""
    print(f"| {' | '.join(columns)} |\n{'|-' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def run_real(setting: Setting, scale: float, model: str) -> dict[str, Any]:
    """Run a small setting on real ranks; `scale` real seconds are one of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "real.json"
        script = Path(__file__).parent / "bench" / "overlap_real.py"
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={setting.num_ranks}", str(script)]
        command = [sys.executable, "-m", *launch, json.dumps(asdict(setting)), str(scale), model, str(out)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise RuntimeError(f"{setting.name}: {ended.stderr[-3000:]}")
        return json.loads(out.read_text())


def simulate_repeats(setting: Setting, count: int = 8) -> list[dict[str, Any]]:
    """Simulate a setting `count` times, with tools up to 1 % slower: a group that ends a moment later may be trained
    a step later, and the run then goes another way."""
    return [Run(replace(setting, slower=0.01, repeat=number)).run() for number in range(count)]


def compare_with_real(settings: Sequence[Setting], scale: float, tokenizer: str) -> Iterator[dict[str, Any]]:
    """Simulate small settings, and run them on real ranks, two at the same time: they sleep most of it."""
    with tempfile.TemporaryDirectory() as model, ThreadPoolExecutor(2) as threads:
        build_tiny_model(tokenizer, model)
        reals = threads.map(partial(run_real, scale=scale, model=model), settings)
        for setting, real in zip(settings, reals, strict=True):
            yield {"simulated": simulate_repeats(setting), "real": real}


def build_tiny_model(tokenizer: str, folder: str) -> None:
    """Save a two-layer Llama of random weights with a model's tokenizer."""
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(tokens),
        **sizes,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=tokens.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)


def find_gap(pair: dict[str, Any], name: str) -> float:
    """Return the relative difference of a figure between the real run and the mean of the simulated ones."""
    return pair["real"][name] / statistics.mean(result[name] for result in pair["simulated"]) - 1.0


def render_pair(pair: dict[str, Any]) -> list[str]:
    """Return the cells of a row: of each figure its mean and relative spread as simulated, its real value, the gap."""
    cells = [pair["real"]["name"]]
    for name in COMPARED:
        values = [result[name] for result in pair["simulated"]]
        mean = statistics.mean(values)
        cells += [f"{mean:.3g} ± {statistics.stdev(values) / mean:.1%}", f"{pair['real'][name]:.3g}"]
        cells.append(f"{find_gap(pair, name):+.1%}")
    return [*cells, f"{pair['real']['late_calls']:.1%}", str(pair["real"]["late_steps"])]


def main() -> None:
    """Simulate, print tables, and write the JSON."""
    parser = argparse.ArgumentParser(description="Simulate rollouts that overlap with training on several ranks.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, default=2_500_000, help="cache of a rank's engine")
    parser.add_argument(
        "--groups-per-rank", type=float, default=8, help="groups of 8 sessions in a rank's part of a step"
    )
    parser.add_argument("--agents-per-slot", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--real", metavar="MODEL", help="compare with 2 and 4 real ranks; takes a quarter of an hour")
    parser.add_argument("--scale", type=float, default=0.1, help="real seconds for a simulated one")
    arguments = parser.parse_args()
    settings = build_settings(
        arguments.ranks,
        arguments.steps,
        arguments.seed,
        arguments.kv_tokens,
        groups_per_rank=arguments.groups_per_rank,
        times=arguments.agents_per_slot,
    )
    results: list[dict[str, Any]] = []
    document: dict[str, Any] = {"settings": [asdict(setting) for setting in settings], "results": results}

    def simulate(setting: Setting) -> list[str]:
        results.append(Run(setting).run())
        return [render(results[-1]) for render in COLUMNS.values()]

    print_rows(list(COLUMNS), map(simulate, settings))
    for lag in (0, 1, 2):
        of_lag = [result for result in results if result["name"].endswith(f"lag {lag}")]
        best = max(of_lag, key=lambda result: result["trained_tokens_per_s"])
        document[f"busy_lag{lag}"] = best["sampling_in_rollout"]
        document[f"slots_lag{lag}"] = best["slots_in_rollout"]
        print(f"{best['name']}: sampling {best['sampling_in_rollout']:.1%} of the time of rollouts")
    if arguments.real:
        by_ranks = [build_small_settings(num_ranks, arguments.seed, arguments.scale) for num_ranks in (2, 4)]
        small = [setting for pair in zip(*by_ranks, strict=True) for setting in pair]
        pairs: list[dict[str, Any]] = []
        document["compared"] = pairs

        def compare(pair: dict[str, Any]) -> list[str]:
            pairs.append(pair)
            return render_pair(pair)

        figures = [column for title in COMPARED.values() for column in (f"{title}, simulated", "real", "difference")]
        real = compare_with_real(small, arguments.scale, arguments.real)
        print_rows(["small setting", *figures, "late calls", "late steps"], map(compare, real))
        document["real_vs_sim"] = max(abs(find_gap(pair, name)) for pair in pairs for name in COMPARED)
        print(f"largest difference: {document['real_vs_sim']:.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
