"""Several ranks share the jobs of a batch: who begins which, who gets which result, and what all agree on."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from open_sessions import TURN, OpenSessions, open_sessions
from rank_threads import make_ranks, run_ranks
from serving import wait_until

from polar_trl.errors import LawError
from polar_trl.rollout.ranks import JobQueues, OneRank, claim_oldest
from polar_trl.rollout.runner import Job, RolloutResult
from polar_trl.types import Task


@pytest.mark.parametrize("seed", range(20))
def test_every_job_is_claimed_once_in_whatever_order_ranks_ask(seed: int) -> None:
    generator = random.Random(seed)
    num_ranks, length = generator.randint(1, 5), generator.randint(0, 6)
    batches = [[f"{batch}-{place}" for place in range(num_ranks * length)] for batch in range(2)]
    waiting = []
    for rank in make_ranks(num_ranks):
        waiting.append([JobQueues(rank, f"b{number}", jobs) for number, jobs in enumerate(batches)])
        for queues in waiting[-1]:
            queues.is_shared = True
    claimed: Counter[str] = Counter()
    asking = list(range(num_ranks))
    while asking:
        rank = generator.choice(asking)
        if (job := claim_oldest(waiting[rank])) is None:
            asking.remove(rank)
            assert waiting[rank] == []
        else:
            claimed[job] += 1
    assert claimed == Counter(batches[0] + batches[1])


def test_a_rank_takes_its_own_first_and_then_the_last_of_the_longest_queue() -> None:
    first, second, third = (JobQueues(rank, "b", list("abcdefghi")) for rank in make_ranks(3))
    assert [second.claim(), second.claim()] == ["d", "e"]
    third.claim()
    for queues in (first, second, third):
        queues.is_shared = True
    assert [second.claim() for _ in range(5)] == ["f", "c", "b", "i", "a"]
    assert [third.claim(), third.claim(), first.claim(), second.claim()] == ["h", None, None, None]


def test_what_another_rank_may_still_begin_itself_is_not_taken() -> None:
    first, second = (JobQueues(rank, "b", list("abcd")) for rank in make_ranks(2))
    assert [first.claim() for _ in range(3)] == ["a", "b", None]
    first.is_shared = True
    assert [first.claim(), second.claim(), second.claim()] == ["d", "c", None]


def test_jobs_that_ranks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="3 jobs cannot be divided among 2 ranks"):
        JobQueues(make_ranks(2)[0], "b", list("abc"))
    assert JobQueues(OneRank(), "b", []).is_empty


def build_jobs(group: str, *scripts: str) -> list[Job]:
    return [
        Job(rollout_id=f"{group}-r{index}", group_id=group, task=Task(id=f"{group}-{index}", instruction=script))
        for index, script in enumerate(scripts)
    ]


def run_both(
    root: Path,
    function: Callable[[OpenSessions, int], Any],
    grade: Any = lambda task, box: 1.0,
    num_ranks: int = 2,
    **config: Any,
) -> list[Any]:
    """Run two ranks, or more, with an engine, a proxy and sandboxes each."""

    def run(rank: Any) -> Any:
        with open_sessions(root / f"rank{rank.rank}", ranks=rank, seen=root, grade=grade, **config) as sessions:
            return function(sessions, rank.rank)

    for rank in range(num_ranks):
        (root / f"rank{rank}").mkdir()
    return run_ranks(num_ranks, run)


def list_ids(results: list[RolloutResult]) -> list[str]:
    return [result.rollout.id for result in results]


def test_sessions_go_where_places_are_free_and_results_to_where_they_belong(tmp_path: Path) -> None:
    """Rank 0 has two places, whose agents wait for all others: rank 1 runs those, and rank 0 gets its three."""

    def run(sessions: OpenSessions, rank: int) -> tuple[list[str], int]:
        waits = [f"while ! test -e {tmp_path}/4; do sleep 0.05; done; {TURN}"] * 2
        jobs = build_jobs("g", *waits, *[TURN] * 4)
        return list_ids(sessions.runner.run(jobs)), len(sessions.engine.params)

    graded: list[str] = []

    def grade(task: Task, box: Any) -> float:
        graded.append(task.id)
        (tmp_path / str(len(graded))).touch()
        return 1.0

    outcomes = run_both(tmp_path, run, grade, max_agents=1, max_preparing=1)
    assert outcomes[0][0] == ["g-r0", "g-r1", "g-r2"]
    assert outcomes[1][0] == ["g-r3", "g-r4", "g-r5"]
    assert [asked for _, asked in outcomes] == [2, 4]


def test_both_ranks_take_the_same_groups_and_the_bound_holds_over_ranks(tmp_path: Path) -> None:
    """The group that rank 1 alone has begun at version 0 is waited for at version 1, by rank 0 too."""

    def run(sessions: OpenSessions, rank: int) -> list[list[str]]:
        slow = f"{TURN}; while ! test -e {tmp_path}/go; do sleep 0.05; done"
        late = f"while ! test -e {tmp_path}/go; do sleep 0.05; done; {TURN}"
        sessions.runner.start(build_jobs("old", late, slow))
        if rank == 1:
            sessions.wait_for_calls(1)
        sessions.runner.start(build_jobs("new", TURN, TURN))
        taken = [list_ids(sessions.runner.take(1))]
        sessions.proxy.hold()
        sessions.runner.start(build_jobs("newer", TURN, TURN))
        sessions.runner.ranks.gather(None)
        sessions.change_policy()
        if rank == 0:
            newer = sessions.runner._groups[1]
            wait_until(lambda: newer.report().num_ended == 1)
            (tmp_path / "go").touch()
        taken.append(list_ids(sessions.runner.take(1)))
        return taken

    assert run_both(tmp_path, run, max_policy_lag=1) == [[["new-r0"], ["old-r0"]], [["new-r1"], ["old-r1"]]]


def test_three_ranks_share_groups_that_do_not_divide_among_them(tmp_path: Path) -> None:
    """Two groups of three, then a single one: fewer groups than ranks. Rank 2 is slow: its agents wait for all others
    of their batch, which the other two ranks then run."""

    def run(sessions: OpenSessions, rank: int) -> list[list[str]]:
        wait = f"while ! test -e {tmp_path}/4; do sleep 0.05; done; {TURN}"
        jobs = [*build_jobs("a", *[TURN] * 3), *build_jobs("b", TURN, wait, wait)]
        sessions.runner.start(jobs)
        taken = [list_ids(sessions.runner.take(2))]
        sessions.proxy.hold()
        sessions.runner.start(build_jobs("c", *[TURN] * 3))
        sessions.change_policy()
        return [*taken, list_ids(sessions.runner.take(1))]

    graded: list[str] = []

    def grade(task: Task, box: Any) -> float:
        graded.append(task.id)
        (tmp_path / str(len(graded))).touch()
        return 1.0

    assert run_both(tmp_path, run, grade, num_ranks=3, max_policy_lag=1, max_agents=1, max_preparing=1) == [
        [["a-r0", "a-r1"], ["c-r0"]],
        [["a-r2", "b-r0"], ["c-r1"]],
        [["b-r1", "b-r2"], ["c-r2"]],
    ]


def test_stragglers_are_cut_by_the_times_of_all_ranks(tmp_path: Path) -> None:
    """Three of four have ended only with those of both ranks."""

    def run(sessions: OpenSessions, rank: int) -> list[str]:
        jobs = build_jobs("g", TURN, TURN, TURN, f"{TURN}; sleep 600")
        return [result.rollout.stop_reason for result in sessions.runner.run(jobs)]

    outcomes = run_both(tmp_path, run, straggler_quantile=0.75)
    assert outcomes == [["completed", "completed"], ["completed", "straggler"]]


@pytest.mark.parametrize("failure", [LawError("a law is broken"), RuntimeError("out of luck")])
def test_a_failure_on_one_rank_stops_both_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def run(sessions: OpenSessions, rank: int) -> str:
        if rank == 1:
            (tmp_path / "ready").touch()
            monkeypatch.setattr(sessions.runner._context.grader, "order", lambda task: raise_(failure))
        else:
            wait_until((tmp_path / "ready").exists)
        with pytest.raises(Exception) as raised:
            sessions.runner.run(build_jobs("g", f"{TURN}; sleep 600", TURN))
        assert sessions.runner.open_jobs() == []
        return f"{type(raised.value).__name__}: {raised.value}"

    def raise_(error: Exception) -> None:
        raise error

    first, second = run_both(tmp_path, run)
    assert second == f"{type(failure).__name__}: {failure}"
    assert str(failure) in first
