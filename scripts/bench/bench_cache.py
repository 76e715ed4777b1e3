"""Simulate sessions whose histories do not all fit the engine's cache, with and without admission by room.

    python scripts/bench/bench_cache.py [--kv-tokens 640000] [--steps 12] [--json FILE]

The engine, the sessions and the training step are those of scripts/bench_overlap.py, on one rank; who is admitted is
decided by the package's own `CacheRoom`. "Prefilled at once" gives the engine the histories of all residents as soon
as the weights have changed, before any call, and not each with its session's next call.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_overlap import Engine, Loop, Process, Rank, Request, Run, Setting, Signal, Sim

from polar_trl.engine.cache_room import CacheRoom
from polar_trl.rollout.stragglers import StragglerCut

COLUMNS = {
    "name": "agents per slot, lag",
    "admission": "admission",
    "seconds_per_step": "s per step",
    "slots_in_rollout": "busy in rollout",
    "trained_tokens_per_s": "tokens/s",
    "prefilled_per_sampled": "prefilled per sampled",
}


class SimulatedGate:
    """`Gate` with a `CacheRoom`, on a simulated clock."""

    def __init__(self, run: Run, rank: Rank) -> None:
        self._run, self._rank = run, rank
        self._room = CacheRoom(run.setting.kv_tokens)
        self._waiting: list[tuple[Sim, Request, Signal]] = []
        self._order: dict[int, int] = {}
        self.sessions: dict[int, Sim] = {}

    def ask(self, session: Sim, request: Request) -> Signal:
        """A call comes; the signal is fired when the engine has it."""
        self._order.setdefault(session.number, len(self._order))
        self.sessions[session.number] = session
        self._waiting.append((session, request, signal := Signal()))
        self.let_in()
        return signal

    def let_in(self) -> None:
        """As `Gate._let_in`."""
        if not self._run.gate.fired:
            return
        for item in sorted(self._waiting, key=lambda item: self._rank_of(item[0])):
            session, request, signal = item
            first = session.number * 1_000_000  # no session shares its prompt here
            if not self._room.admit(session.number, range(first, first + request.context)):  # type: ignore[arg-type]
                return
            self._waiting.remove(item)
            session.versions[self._run.version] += request.sampled
            self._rank.engine.submit(request)
            self._run.loop.fire(signal)

    def leave(self, session: Sim) -> None:
        """A call has its answer."""
        self._room.leave(session.number)
        self.let_in()

    def forget(self, session: Sim) -> None:
        """A session has ended."""
        del self.sessions[session.number]
        self._room.forget(session.number)
        self.let_in()

    def residents(self) -> list[Sim]:
        return [session for number, session in self.sessions.items() if self._room.is_resident(number)]

    def _rank_of(self, session: Sim) -> tuple[bool, int]:
        return not self._room.is_resident(session.number), self._order[session.number]


class AdmittedRun(Run):
    """A run whose gate admits by room."""

    def __init__(self, setting: Setting, *, prefills_at_once: bool = False) -> None:
        super().__init__(setting)
        (self.rank,) = self.ranks
        self.room = SimulatedGate(self, self.rank)
        if prefills_at_once:
            self.rank.engine = PrefillingEngine(self.loop, setting, self.room)

    def _agent(self, rank: Rank, session: Sim, cut: StragglerCut) -> Process:
        setting, begun = self.setting, self.loop.now
        session.context = setting.prompt_tokens
        for sampled, tool_s in zip(session.sampled, session.tools_s, strict=True):
            asked = self.loop.now
            request = Request(session.number, session.context, sampled)
            admitted = self.room.ask(session, request)
            while not admitted.fired:
                yield admitted if self.gate.fired else self.gate
                self.room.let_in()
            session.held_s += self.loop.now - asked
            yield request.done
            self.room.leave(session)
            self.loop.fire(self.changed)
            session.context += sampled
            left_s = cut.limit_s - (self.loop.now - begun - session.held_s)
            session.was_cut = left_s <= tool_s
            yield max(0.0, min(left_s, tool_s))
            if session.was_cut:
                break
            session.context += setting.observed_tokens
        self.room.forget(session)


class PrefillingEngine(Engine):
    """Computes the histories of all residents again at once when the weights have changed."""

    def __init__(self, loop: Loop, setting: Setting, gate: SimulatedGate) -> None:
        super().__init__(loop, setting)
        self._gate = gate

    def forget(self) -> None:
        """The weights change."""
        super().forget()
        for session in self._gate.residents():
            self.submit(Request(session.number, session.context, 0))


def simulate(kv_tokens: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Rows by agents per slot, lag and admission."""
    rows = []
    for lag, times in ((0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4), (2, 4)):
        setting = Setting(
            name=f"{times}x, lag {lag}",
            num_ranks=1,
            agents_per_slot=times,
            max_policy_lag=lag,
            steps=steps,
            seed=seed,
            kv_tokens=kv_tokens,
        )
        runs = {"none": Run(setting), "by room": AdmittedRun(setting)}
        if lag and times == 4:
            runs["by room, prefilled at once"] = AdmittedRun(setting, prefills_at_once=True)
        for name, run in runs.items():
            rows.append(run.run() | {"admission": name})
            print(render(rows[-1]), flush=True)
    return rows


def render(row: dict[str, Any]) -> str:
    """One line of a Markdown table."""
    cells = dict(row)
    cells["slots_in_rollout"] = f"{row['slots_in_rollout']:.0%}"
    cells["prefilled_per_sampled"] = f"{row['prefilled_per_sampled']:.1f}"
    for name in ("seconds_per_step", "trained_tokens_per_s"):
        cells[name] = f"{row[name]:.0f}"
    return "| " + " | ".join(str(cells[name]) for name in COLUMNS) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-tokens", type=int, default=640_000, help="that the cache has room for")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    print(f"| {' | '.join(COLUMNS.values())} |\n{'|---' * len(COLUMNS)}|")
    rows = simulate(args.kv_tokens, args.steps, args.seed)
    if args.json is not None:
        args.json.write_text(json.dumps({"kv_tokens": args.kv_tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
