#!/usr/bin/env python3
"""Rollouts that overlap with training on several ranks: a simulation on a simulated clock of how busy the engines are.

    python scripts/bench_overlap.py [--ranks 8] [--json FILE] [--steps 12] [--kv-tokens 2500000] [--real]

Which groups a step takes, which rank begins which session, and who is a straggler are decided by the package's own
code (`choose_groups`, `JobQueues`, `StragglerCut`); the gate drains and holds calls as the proxy's does. The engine of
each rank is a model of continuous batching: `slots` sequences decode together, a step of n of them takes
`step_s + n * step_s_per_sequence`; prefill goes first and stops decoding; a prefix cache of `kv_tokens` (least
recently used goes first) is emptied when the weights change, so that a held session's whole history is prefilled
again. Every setting draws the same sessions.

Two figures of how busy engines are, both of the time in which rollouts are made (from the release of the weights to
the last call before they change), mean over ranks: "slots" is the share of slots in use, "sampling" the share of time
in which at least one is, as a GPU's own utilization counts. The JSON's busy_lagN are "sampling" of the best setting
with that lag; slots_lagN are its "slots".

`--real` runs small settings on 2 and 4 real ranks (processes with torch.distributed; the real runner, proxy and gate;
agents and an engine that sleep, see `scripts/bench/overlap_real.py`) and compares.
"""

import argparse
import heapq
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from polar_trl.rollout.ranks import JobQueues, claim_oldest
from polar_trl.rollout.staleness import GroupState, choose_groups
from polar_trl.rollout.stragglers import StragglerCut

Process = Generator["float | Signal", None, None]


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
    prompt_tokens: int = 5_000
    observed_tokens: int = 700
    calls: tuple[float, float] = (26.0, 0.6)
    sampled_tokens: tuple[float, float] = (220.0, 0.8)
    tool_s: tuple[float, float] = (4.0, 1.2)
    prepare_s: tuple[float, float] = (1.0, 0.5)
    grade_s: tuple[float, float] = (15.0, 0.7)
    max_calls: int = 200
    max_sampled_tokens: int = 8_192
    max_preparing: int = 4
    max_grading: int = 8

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


@dataclass(slots=True, eq=False)
class Signal:
    """Something that processes wait for; fired once."""

    waiting: list[Process] = field(default_factory=list)
    fired: bool = False


class Loop:
    """Processes on a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action))

    def start(self, process: Process) -> None:
        self.at(self.now, lambda: self._resume(process))

    def fire(self, signal: Signal) -> None:
        signal.fired = True
        for process in signal.waiting:
            self.start(process)
        signal.waiting.clear()

    def run(self, until: Signal) -> None:
        while not until.fired:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def _resume(self, process: Process) -> None:
        for asked in process:
            if isinstance(asked, Signal):
                if asked.fired:
                    continue
                asked.waiting.append(process)
            else:
                self.at(self.now + asked, lambda: self._resume(process))
            return


class Places:
    """A stage with so many places, given out in the order of asking."""

    def __init__(self, loop: Loop, count: int) -> None:
        self._loop = loop
        self._free = count
        self._queue: deque[Signal] = deque()

    def enter(self) -> Signal:
        signal = Signal()
        self._queue.append(signal)
        self._admit()
        return signal

    def leave(self) -> None:
        self._free += 1
        self._admit()

    def _admit(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._loop.fire(self._queue.popleft())


@dataclass(slots=True, eq=False)
class Request:
    """One call inside the engine."""

    session: int
    context: int
    """Tokens of the prompt."""
    sampled: int
    done: Signal = field(default_factory=Signal)


class Engine:
    """Continuous batching with a prefix cache."""

    def __init__(self, loop: Loop, setting: Setting) -> None:
        self._loop = loop
        self._setting = setting
        self._queue: deque[Request] = deque()
        self._prefill: deque[tuple[Request, int]] = deque()
        self._prefill_end: float | None = None
        self._running: list[tuple[float, int, Request]] = []
        """Heap by the decoding step at which it ends."""
        self._num_steps = 0.0
        self._cache: OrderedDict[int, int] = OrderedDict()
        """Session -> tokens kept, least recently used first; of those that run, too."""
        self._since = 0.0
        self._wakes = 0
        self.slot_seconds = 0.0
        self.sampling_seconds = 0.0
        self.sampled_tokens = 0
        self.prefilled_tokens = 0

    @property
    def num_inside(self) -> int:
        return len(self._queue) + self._num_in_slots

    @property
    def _num_in_slots(self) -> int:
        return len(self._prefill) + len(self._running)

    def submit(self, request: Request) -> None:
        self._advance()
        self._queue.append(request)
        self._schedule()

    def forget(self) -> None:
        """The weights change."""
        self._cache.clear()

    def settle(self) -> None:
        """Bring the counts up to now."""
        self._advance()
        self._schedule()

    def _advance(self) -> None:
        elapsed = self._loop.now - self._since
        self._since = self._loop.now
        self.slot_seconds += elapsed * self._num_in_slots
        self.sampling_seconds += elapsed * (self._num_in_slots > 0)
        if self._running and self._prefill_end is None:
            self._num_steps += elapsed / self._step_s()

    def _step_s(self) -> float:
        return self._setting.step_s + self._setting.step_s_per_sequence * len(self._running)

    def _schedule(self) -> None:
        """Admit, then have the next thing that ends wake the engine up."""
        while self._queue and self._num_in_slots < self._setting.slots:
            request = self._queue.popleft()
            new = request.context - min(self._cache.pop(request.session, 0), request.context)
            self._cache[request.session] = request.context + request.sampled
            self.prefilled_tokens += new
            self._prefill.append((request, new))
            self._evict()
        if self._prefill and self._prefill_end is None:
            self._prefill_end = self._loop.now + self._prefill[0][1] / self._setting.prefill_tokens_per_s
        if self._prefill_end is not None:
            when = self._prefill_end
        elif self._running:
            when = self._loop.now + max(0.0, self._running[0][0] - self._num_steps) * self._step_s()
        else:
            return
        self._wakes += 1
        wake = self._wakes
        self._loop.at(when, lambda: self._wake() if wake == self._wakes else None)

    def _evict(self) -> None:
        """Down to what fits; what is in a slot stays."""
        too_many = sum(self._cache.values()) - self._setting.kv_tokens
        if too_many <= 0:
            return
        kept = {request.session for request, _ in self._prefill} | {request.session for _, _, request in self._running}
        for session in list(self._cache):
            if too_many <= 0:
                return
            if session not in kept:
                too_many -= self._cache.pop(session)

    def _wake(self) -> None:
        self._advance()
        if self._prefill_end is not None:
            request, _ = self._prefill.popleft()
            self._prefill_end = None
            heapq.heappush(self._running, (self._num_steps + request.sampled, request.session, request))
        else:
            while self._running and self._running[0][0] <= self._num_steps + 1e-6:
                _, _, request = heapq.heappop(self._running)
                self.sampled_tokens += request.sampled
                self._loop.fire(request.done)
        self._schedule()


@dataclass(slots=True, eq=False)
class Sim:
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
    held_s: float = 0.0
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
    """One process: its engine, its places, and the jobs that it sees waiting."""

    def __init__(self, loop: Loop, setting: Setting, number: int, counters: Counter[str]) -> None:
        self.engine = Engine(loop, setting)
        self.places = {
            "prepare": Places(loop, setting.max_preparing),
            "agent": Places(loop, setting.max_agents),
            "grade": Places(loop, setting.max_grading),
        }
        self.ranks: Any = SharedCounters(number, setting.num_ranks, counters)
        self.waiting: list[JobQueues[tuple[Sim, StragglerCut]]] = []
        self.num_free = setting.max_agents + setting.max_preparing


class Run:
    """One setting, from the first session to the last step."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.loop = Loop()
        counters: Counter[str] = Counter()
        self.ranks = [Rank(self.loop, setting, number, counters) for number in range(setting.num_ranks)]
        self.version = 0
        self.gate = Signal(fired=True)
        self.changed, self.ended = Signal(), Signal()
        self.open: dict[int, list[Sim]] = {}
        self.num_running: Counter[int] = Counter()
        """Sessions of a group that have not ended."""
        self.num_started = 0
        self.lags: Counter[int] = Counter()
        self.rows: list[dict[str, float]] = []
        self.num_cut = 0
        self.num_moved = 0

    def run(self) -> dict[str, Any]:
        """Return the figures of all steps but the first."""
        done = Signal()
        self.loop.start(self._train(done))
        self.loop.run(done)
        return self._summarize()

    def _train(self, done: Signal) -> Process:
        """Do what the trainers do, step by step."""
        setting, loop = self.setting, self.loop
        for _ in range(setting.num_open):
            self._start_batch()
        for _ in range(setting.steps):
            before = self._mark()
            while (taken := self._choose()) is None:
                self.ended = Signal()
                yield self.ended
            waited = loop.now
            self.gate = Signal()
            while any(rank.engine.num_inside for rank in self.ranks):
                self.changed = Signal()
                yield self.changed
            after = self._mark()
            sessions = [session for group in taken for session in self.open.pop(group)]
            for session in sessions:
                for version, count in session.versions.items():
                    self.lags[self.version - version] += count
            self.num_cut += sum(session.was_cut for session in sessions)
            num_tokens = sum(session.context for session in sessions) / setting.num_ranks
            yield setting.sync_s + num_tokens / setting.train_tokens_per_s
            self.version += 1
            for rank in self.ranks:
                rank.engine.forget()
            loop.fire(self.gate)
            self._start_batch()
            row = {name: after[name] - before[name] for name in after}
            trained = sum(sum(session.versions.values()) for session in sessions)
            more = {"drain_s": after["now"] - waited, "step_s": loop.now - before["now"], "trained_tokens": trained}
            self.rows.append(row | more)
        loop.fire(done)

    def _mark(self) -> dict[str, float]:
        engines = [rank.engine for rank in self.ranks]
        for engine in engines:
            engine.settle()
        names = ("slot_seconds", "sampling_seconds", "sampled_tokens", "prefilled_tokens")
        return {"now": self.loop.now} | {name: sum(getattr(engine, name) for engine in engines) for name in names}

    def _choose(self) -> list[int] | None:
        groups = list(self.open)
        if sum(self.num_running[group] == 0 for group in groups) < self.setting.num_groups:
            return None
        states = [
            GroupState(
                first_policy_version=min((v for session in sessions for v in session.versions), default=None),
                finished_s=None if self.num_running[group] else max(session.ended_s for session in sessions),
            )
            for group, sessions in self.open.items()
        ]
        places = choose_groups(
            states, self.setting.num_groups, version=self.version, max_policy_lag=self.setting.max_policy_lag
        )
        return None if places is None else [groups[place] for place in places]

    def _start_batch(self) -> None:
        setting = self.setting
        cut = StragglerCut(setting.num_groups * setting.group_size, setting.straggler_quantile)
        name, jobs = f"batch-{self.num_started}", []
        for _ in range(setting.num_groups):
            group = self.num_started // setting.group_size
            self.open[group] = [draw_session(setting, self.num_started + i) for i in range(setting.group_size)]
            self.num_started += setting.group_size
            self.num_running[group] = setting.group_size
            jobs += [(session, cut) for session in self.open[group]]
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
            self.loop.start(self._session(rank, session, cut))

    def _session(self, rank: Rank, session: Sim, cut: StragglerCut) -> Process:
        """Do what `SessionRun` does, without the agent."""
        for stage, seconds in (("prepare", session.prepare_s), ("agent", 0.0), ("grade", session.grade_s)):
            yield rank.places[stage].enter()
            if stage == "agent":
                begun = self.loop.now
                yield from self._agent(rank, session, cut)
                cut.note(self.loop.now - begun - session.held_s)
                rank.num_free += 1
            else:
                yield seconds
            rank.places[stage].leave()
            if stage == "agent":
                self._begin_sessions(rank)
        session.ended_s = self.loop.now
        self.num_running[session.group] -= 1
        self.loop.fire(self.ended)

    def _agent(self, rank: Rank, session: Sim, cut: StragglerCut) -> Process:
        setting, begun = self.setting, self.loop.now
        session.context = setting.prompt_tokens
        for sampled, tool_s in zip(session.sampled, session.tools_s, strict=True):
            asked = self.loop.now
            while not self.gate.fired:
                yield self.gate
            session.held_s += self.loop.now - asked
            session.versions[self.version] += sampled
            request = Request(session.number, session.context, sampled)
            rank.engine.submit(request)
            yield request.done
            self.loop.fire(self.changed)  # the trainer may wait for the engine to be empty
            session.context += sampled
            # the agent may be cut while its tool runs; one that is cut within a call is cut after it here
            left_s = cut.limit_s - (self.loop.now - begun - session.held_s)
            if left_s <= tool_s:
                session.was_cut = True
                yield max(0.0, left_s)
                return
            yield tool_s
            session.context += setting.observed_tokens

    def _summarize(self) -> dict[str, Any]:
        rows = self.rows[1:]  # the first step has no step before it to overlap with
        total = {name: sum(row[name] for row in rows) for name in rows[0]}
        tokens = sum(self.lags.values())
        ranks, slots, steps = self.setting.num_ranks, self.setting.slots, len(rows)
        return {
            "name": self.setting.name,
            "seconds_per_step": total["step_s"] / steps,
            "rollout_s": total["now"] / steps,
            "drain_s": total["drain_s"] / steps,
            "slots_in_rollout": total["slot_seconds"] / (ranks * slots * total["now"]),
            "sampling_in_rollout": total["sampling_seconds"] / (ranks * total["now"]),
            "slots_in_all": total["slot_seconds"] / (ranks * slots * total["step_s"]),
            "trained_tokens_per_s": total["trained_tokens"] / total["step_s"],
            "prefilled_per_sampled": total["prefilled_tokens"] / total["sampled_tokens"],
            "moved": self.num_moved / self.num_started,
            "stragglers": self.num_cut,
            "policy_lag": {str(lag): count / tokens for lag, count in sorted(self.lags.items())},
        }


def draw_session(setting: Setting, number: int) -> Sim:
    """Draw a session by its number: the same for every setting."""
    generator = random.Random(f"{setting.seed}-{number}")

    def draw(distribution: tuple[float, float]) -> float:
        return generator.lognormvariate(math.log(distribution[0]), distribution[1])

    num_calls = max(1, min(setting.max_calls, round(draw(setting.calls))))
    return Sim(
        number=number,
        group=number // setting.group_size,
        sampled=[
            max(1, min(setting.max_sampled_tokens, round(draw(setting.sampled_tokens)))) for _ in range(num_calls)
        ],
        tools_s=[draw(setting.tool_s) for _ in range(num_calls)],
        prepare_s=draw(setting.prepare_s),
        grade_s=draw(setting.grade_s),
    )


def build_settings(
    num_ranks: int,
    steps: int,
    seed: int,
    kv_tokens: int,
    *,
    groups_per_rank: float = 8,
    times: Sequence[float] = (1, 2, 4),
) -> list[Setting]:
    """Return settings with and without carry-over, at so many `times` agents per slot, and with stragglers cut."""
    shared: dict[str, Any] = {"num_ranks": num_ranks, "steps": steps, "seed": seed, "kv_tokens": kv_tokens}
    shared["groups_per_rank"] = groups_per_rank
    settings = [
        Setting(name=f"{number:g}x, lag {lag}", agents_per_slot=number, max_policy_lag=lag, **shared)
        for lag in (0, 1, 2)
        for number in times
    ]
    cut: dict[str, Any] = {"agents_per_slot": 4, "straggler_quantile": 0.9}
    settings += [Setting(name=f"4x, lag {lag}, cut at 0.9", max_policy_lag=lag, **cut, **shared) for lag in (0, 1)]
    return settings


def build_small_settings(num_ranks: int, seed: int) -> list[Setting]:
    """Return what real ranks can imitate within minutes; a group of 4 lies on two of them."""
    small: dict[str, Any] = {"groups_per_rank": 1.5, "group_size": 4, "slots": 3, "calls": (8.0, 0.6), "steps": 9}
    ideal: dict[str, Any] = {"kv_tokens": 10**9, "prefill_tokens_per_s": math.inf, "step_s_per_sequence": 0.0}
    engine: dict[str, Any] = {"step_s": 0.022, "train_tokens_per_s": 2_000.0, "seed": seed, "num_ranks": num_ranks}
    return [
        Setting(
            name=f"{num_ranks} ranks, {times}x, lag {lag}",
            agents_per_slot=times,
            max_policy_lag=lag,
            max_preparing=1,
            **small,
            **ideal,
            **engine,
        )
        for lag, times in ((0, 1), (1, 1), (1, 2))
    ]


def render_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = [
        "| agents per slot, lag | s per step | of it rollout | drain | slots | sampling | slots in all | tokens/s |"
        " prefilled per sampled | moved | cut | lag of trained tokens |",
        "|-|-|-|-|-|-|-|-|-|-|-|-|",
    ]
    for result in results:
        lag = ", ".join(f"{lag}: {share:.0%}" for lag, share in result["policy_lag"].items())
        lines.append(
            f"| {result['name']} | {result['seconds_per_step']:.0f} | {result['rollout_s']:.0f} "
            f"| {result['drain_s']:.0f} | {result['slots_in_rollout']:.0%} | {result['sampling_in_rollout']:.1%} "
            f"| {result['slots_in_all']:.0%} | {result['trained_tokens_per_s']:.0f} "
            f"| {result['prefilled_per_sampled']:.1f} | {result['moved']:.0%} | {result['stragglers']} | {lag} |"
        )
    return "\n".join(lines)


def run_real(setting: Setting, scale: float) -> dict[str, Any]:
    """Run a small setting on real ranks; `scale` real seconds are one of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "real.json"
        script = Path(__file__).parent / "bench" / "overlap_real.py"
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={setting.num_ranks}", str(script)]
        subprocess.run([sys.executable, "-m", *launch, json.dumps(asdict(setting)), str(scale), str(out)], check=True)
        return json.loads(out.read_text())


def compare_with_real(seed: int, scale: float) -> list[dict[str, Any]]:
    """Simulate small settings, and run them on real ranks."""
    pairs = []
    print("| small setting | s per step, simulated | real | slots, simulated | real | lag 1, simulated | real |")
    print("|-|-|-|-|-|-|-|")
    settings = [*build_small_settings(2, seed), *build_small_settings(4, seed)]
    with ThreadPoolExecutor(len(settings)) as threads:  # their processes sleep most of the time
        for setting, real in zip(settings, threads.map(partial(run_real, scale=scale), settings), strict=True):
            pair = {"simulated": Run(setting).run(), "real": real}
            pairs.append(pair)
            columns = [
                *(f"{result['seconds_per_step']:.1f}" for result in pair.values()),
                *(f"{result['slots_in_rollout']:.1%}" for result in pair.values()),
                *(f"{result['policy_lag'].get('1', 0.0):.0%}" for result in pair.values()),
            ]
            print(f"| {setting.name} | {' | '.join(columns)} |", flush=True)
    return pairs


def find_gap(pairs: Sequence[dict[str, Any]]) -> float:
    """Return the largest relative difference between real and simulated: of a step's time, and of slots in use."""
    return max(
        abs(pair["real"][name] / pair["simulated"][name] - 1.0)
        for pair in pairs
        for name in ("seconds_per_step", "slots_in_rollout")
    )


def main() -> None:
    """Simulate, print tables, and write the JSON."""
    parser = argparse.ArgumentParser(description="Simulate rollouts that overlap with training on several ranks.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[2_500_000], help="cache of a rank's engine")
    parser.add_argument(
        "--groups-per-rank", type=float, default=8, help="groups of 8 sessions in a rank's part of a step"
    )
    parser.add_argument("--agents-per-slot", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--real", action="store_true", help="compare with 2 and 4 real ranks; takes minutes")
    parser.add_argument("--scale", type=float, default=0.12, help="real seconds for a simulated one")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"settings": [], "results": []}
    for kv_tokens in arguments.kv_tokens:
        settings = build_settings(
            arguments.ranks,
            arguments.steps,
            arguments.seed,
            kv_tokens,
            groups_per_rank=arguments.groups_per_rank,
            times=arguments.agents_per_slot,
        )
        results = [Run(setting).run() for setting in settings]
        print(f"\nRoom for {kv_tokens} tokens of keys and values:\n\n{render_table(results)}\n", flush=True)
        document["settings"] += [asdict(setting) for setting in settings]
        document["results"] += results
    whole = [
        (setting, result)
        for setting, result in zip(document["settings"], document["results"], strict=True)
        if setting["straggler_quantile"] is None and setting["kv_tokens"] == arguments.kv_tokens[0]
    ]
    for lag in (0, 1, 2):
        of_lag = [result for setting, result in whole if setting["max_policy_lag"] == lag]
        best = max(of_lag, key=lambda result: result["trained_tokens_per_s"])
        document[f"busy_lag{lag}"] = best["sampling_in_rollout"]
        document[f"slots_lag{lag}"] = best["slots_in_rollout"]
        print(f"lag {lag}, {best['name']}: sampling {best['sampling_in_rollout']:.1%} of the time of rollouts")
    if arguments.real:
        document["compared"] = compare_with_real(arguments.seed, arguments.scale)
        document["real_vs_sim"] = find_gap(document["compared"])
        print(f"largest difference: {document['real_vs_sim']:.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
