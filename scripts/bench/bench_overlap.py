#!/usr/bin/env python3
"""Rollouts that overlap with training: a discrete-event simulation on a simulated clock -> how busy the engine is.

    python scripts/bench/bench_overlap.py [--json FILE] [--steps 12] [--kv-tokens 2500000 640000] [--real-scale 0.03]

Nothing is measured in the first tables: no model, no sockets, no threads. What is real is the policy: which groups a
step takes is decided by `polar_trl.rollout.staleness`, who is a straggler by `polar_trl.rollout.stragglers`, and the
gate drains and holds calls as the proxy's does. The engine is a model of continuous batching: `slots` sequences decode
together, a step of n of them takes `step_s + n * step_s_per_sequence`; prefill goes first and stops decoding; a prefix
cache of `kv_tokens` (least recently used goes first) is emptied when the weights change, so that a held session's
whole history is prefilled again. Every run draws the same sessions. With `--real-scale`, small settings are simulated
and then run by the real runner, proxy and gate with time scaled down (see `overlap_real.py`): how far is the
simulation off?

It refuses to call an engine busy that has one sequence in sixteen slots: "busy" is the mean share of slots in use.
"""

import argparse
import heapq
import json
import logging
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polar_trl.rollout.staleness import GroupState, choose_groups
from polar_trl.rollout.stragglers import StragglerCut

Process = Generator["float | Signal", None, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run. Times in seconds, lengths in tokens; pairs are median and sigma of a log-normal distribution."""

    name: str
    oversubscription: int
    max_policy_lag: int
    straggler_quantile: float | None = None
    steps: int
    seed: int
    kv_tokens: int
    num_groups: int = 8
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
        kept = {request.session for request, _ in self._prefill} | {request.session for _, _, request in self._running}
        too_many = sum(self._cache.values()) - self._setting.kv_tokens
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
    ended_s: float | None = None


class Run:
    """One setting, from the first session to the last step."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.loop = Loop()
        self.engine = Engine(self.loop, setting)
        self.places = {
            "prepare": Places(self.loop, setting.max_preparing),
            "agent": Places(self.loop, setting.oversubscription * setting.slots),
            "grade": Places(self.loop, setting.max_grading),
        }
        self.version = 0
        self.gate = Signal(fired=True)
        self.changed = Signal()
        self.open: dict[int, list[Sim]] = {}
        self.num_started = 0
        self.lags: Counter[int] = Counter()
        self.rows: list[dict[str, float]] = []
        self.num_cut = 0

    def run(self) -> dict[str, Any]:
        done = Signal()
        self.loop.start(self._train(done))
        self.loop.run(done)
        return self._summarise()

    def _train(self, done: Signal) -> Process:
        """What the trainer does, step by step."""
        setting, loop, engine = self.setting, self.loop, self.engine
        for _ in range(setting.num_open):
            self._start_batch()
        for _ in range(setting.steps):
            begun, slot_seconds, sampled, prefilled = self._mark()
            while (taken := self._choose()) is None:
                self.changed = Signal()
                yield self.changed
            waited = loop.now
            self.gate = Signal()
            while engine.num_inside:
                self.changed = Signal()
                yield self.changed
            _, slot_seconds_end, sampled_end, prefilled_end = self._mark()
            rollout_s, drain_s = loop.now - begun, loop.now - waited
            sessions = [session for group in taken for session in self.open.pop(group)]
            for session in sessions:
                for version, count in session.versions.items():
                    self.lags[self.version - version] += count
            self.num_cut += sum(session.was_cut for session in sessions)
            yield setting.sync_s + sum(session.context for session in sessions) / setting.train_tokens_per_s
            self.version += 1
            engine.forget()
            loop.fire(self.gate)
            self._start_batch()
            self.rows.append(
                {
                    "step_s": loop.now - begun,
                    "rollout_s": rollout_s,
                    "drain_s": drain_s,
                    "slot_seconds": slot_seconds_end - slot_seconds,
                    "sampled_tokens": sampled_end - sampled,
                    "prefilled_tokens": prefilled_end - prefilled,
                    "trained_sampled_tokens": sum(sum(session.versions.values()) for session in sessions),
                }
            )
        loop.fire(done)

    def _mark(self) -> tuple[float, float, int, int]:
        self.engine.settle()
        return self.loop.now, self.engine.slot_seconds, self.engine.sampled_tokens, self.engine.prefilled_tokens

    def _choose(self) -> list[int] | None:
        groups = list(self.open)
        states = [
            GroupState(
                first_policy_version=min((v for session in sessions for v in session.versions), default=None),
                finished_s=max(session.ended_s or 0.0 for session in sessions)
                if all(session.ended_s is not None for session in sessions)
                else None,
            )
            for sessions in self.open.values()
        ]
        places = choose_groups(
            states, self.setting.num_groups, version=self.version, max_policy_lag=self.setting.max_policy_lag
        )
        return None if places is None else [groups[place] for place in places]

    def _start_batch(self) -> None:
        setting = self.setting
        cut = StragglerCut(setting.num_groups * setting.group_size, setting.straggler_quantile)
        for _ in range(setting.num_groups):
            group = self.num_started // setting.group_size
            self.open[group] = [draw_session(setting, self.num_started + i) for i in range(setting.group_size)]
            self.num_started += setting.group_size
            for session in self.open[group]:
                self.loop.start(self._session(session, cut))

    def _session(self, session: Sim, cut: StragglerCut) -> Process:
        """What `polar_trl.rollout.session_run` does, without the agent."""
        for stage, seconds in (("prepare", session.prepare_s), ("agent", 0.0), ("grade", session.grade_s)):
            yield self.places[stage].enter()
            if stage == "agent":
                begun = self.loop.now
                yield from self._agent(session, cut)
                cut.note(self.loop.now - begun - session.held_s)
            else:
                yield seconds
            self.places[stage].leave()
        session.ended_s = self.loop.now
        self.loop.fire(self.changed)

    def _agent(self, session: Sim, cut: StragglerCut) -> Process:
        setting, begun = self.setting, self.loop.now
        session.context = setting.prompt_tokens
        for sampled, tool_s in zip(session.sampled, session.tools_s, strict=True):
            asked = self.loop.now
            while not self.gate.fired:
                yield self.gate
            session.held_s += self.loop.now - asked
            session.versions[self.version] += sampled
            request = Request(session.number, session.context, sampled)
            self.engine.submit(request)
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

    def _summarise(self) -> dict[str, Any]:
        rows = self.rows[1:]  # the first step has no step before it to overlap with
        total = {name: sum(row[name] for row in rows) for name in rows[0]}
        tokens = sum(self.lags.values())
        slots, steps = self.setting.slots, len(rows)
        return {
            "name": self.setting.name,
            "seconds_per_step": total["step_s"] / steps,
            "rollout_s": total["rollout_s"] / steps,
            "drain_s": total["drain_s"] / steps,
            "busy_in_rollout": total["slot_seconds"] / (slots * total["rollout_s"]),
            "busy_in_all": total["slot_seconds"] / (slots * total["step_s"]),
            "sampled_tokens_per_s": total["trained_sampled_tokens"] / total["step_s"],
            "prefilled_per_sampled": total["prefilled_tokens"] / total["sampled_tokens"],
            "stragglers": self.num_cut,
            "policy_lag": {str(lag): count / tokens for lag, count in sorted(self.lags.items())},
        }


def draw_session(setting: Setting, number: int) -> Sim:
    """The same for every setting."""
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


def build_settings(steps: int, seed: int, kv_tokens: int) -> list[Setting]:
    """With and without carry-over, at 1, 2 and 4 agents per slot, and with stragglers cut."""
    shared: dict[str, Any] = {"steps": steps, "seed": seed, "kv_tokens": kv_tokens}
    settings = [
        Setting(name=f"{times}x, lag {lag}", oversubscription=times, max_policy_lag=lag, **shared)
        for lag in (0, 1, 2)
        for times in (1, 2, 4)
    ]
    cut: dict[str, Any] = {"oversubscription": 4, "straggler_quantile": 0.9}
    settings += [Setting(name=f"4x, lag {lag}, cut at 0.9", max_policy_lag=lag, **cut, **shared) for lag in (0, 1)]
    return settings


def build_small_settings(seed: int) -> list[Setting]:
    """What the real runner can imitate within minutes."""
    small: dict[str, Any] = {"num_groups": 4, "group_size": 2, "slots": 3, "calls": (8.0, 0.6), "steps": 5}
    ideal: dict[str, Any] = {"kv_tokens": 10**9, "prefill_tokens_per_s": math.inf, "step_s_per_sequence": 0.0}
    engine: dict[str, Any] = {"step_s": 0.022, "train_tokens_per_s": 2_000.0, "seed": seed}
    return [
        Setting(name=f"{times}x, lag {lag}", oversubscription=times, max_policy_lag=lag, **small, **ideal, **engine)
        for lag in (0, 1)
        for times in (1, 4)
    ]


def render_table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| agents per slot, lag | s per step | of it rollout | drain | busy in rollout | busy in all | tokens/s |"
        " prefilled per sampled | cut | lag of trained tokens |",
        "|-|-|-|-|-|-|-|-|-|-|",
    ]
    for result in results:
        lag = ", ".join(f"{lag}: {share:.0%}" for lag, share in result["policy_lag"].items())
        lines.append(
            f"| {result['name']} | {result['seconds_per_step']:.0f} | {result['rollout_s']:.0f} "
            f"| {result['drain_s']:.0f} | {result['busy_in_rollout']:.0%} | {result['busy_in_all']:.0%} "
            f"| {result['sampled_tokens_per_s']:.0f} | {result['prefilled_per_sampled']:.1f} "
            f"| {result['stragglers']} | {lag} |"
        )
    return "\n".join(lines)


def compare_with_real(seed: int, scale: float) -> list[dict[str, Any]]:
    """Small settings, simulated and by the real runner."""
    from overlap_real import run_real  # it imports this file

    logging.getLogger("polar_trl").setLevel(logging.ERROR)  # sessions that are open at the end are stopped
    pairs = []
    print(
        "| small setting | s per step, simulated | real | busy in rollout, simulated | real "
        "| lag 1, simulated | real |"
    )
    print("|-|-|-|-|-|-|-|")
    for setting in build_small_settings(seed):
        pair = {"simulated": Run(setting).run(), "real": run_real(setting, scale)}
        pairs.append(pair)
        columns = [
            *(f"{result['seconds_per_step']:.0f}" for result in pair.values()),
            *(f"{result['busy_in_rollout']:.0%}" for result in pair.values()),
            *(f"{result['policy_lag'].get('1', 0.0):.0%}" for result in pair.values()),
        ]
        print(f"| {setting.name} | {' | '.join(columns)} |")
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[2_500_000, 640_000])
    parser.add_argument("--real-scale", type=float, help="real seconds per simulated one for the real runner, as 0.03")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"settings": [], "results": []}
    for kv_tokens in arguments.kv_tokens:
        settings = build_settings(arguments.steps, arguments.seed, kv_tokens)
        results = [Run(setting).run() for setting in settings]
        print(f"\nRoom for {kv_tokens} tokens of keys and values:\n\n{render_table(results)}\n")
        document["settings"] += [asdict(setting) for setting in settings]
        document["results"] += results
    if arguments.real_scale is not None:
        document["real_scale"] = arguments.real_scale
        document["compared"] = compare_with_real(arguments.seed, arguments.real_scale)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
