"""Which sessions' calls the engine gets, by the room of its cache."""

from collections import Counter
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from polar_trl.engine.cache_room import CHUNK, CacheRoom


def ids(number: int, length: int, shared: int = 0) -> tuple[int, ...]:
    """A prompt that has its first `shared` tokens in common with all others."""
    return (0,) * shared + (number + 1,) * (length - shared)


def test_where_all_fit_none_waits() -> None:
    room = CacheRoom(3000)
    assert all(room.admit(number, ids(number, 1000)) for number in range(3))
    assert room.num_used == 3000


def test_one_that_has_no_room_waits_until_another_ends() -> None:
    room = CacheRoom(2500)
    assert room.admit("a", ids(0, 1000)) and room.admit("b", ids(1, 1000))
    room.leave("a")  # its tool runs: what it has in the cache stays
    assert not room.admit("c", ids(2, 1000))
    room.forget("a")
    assert room.admit("c", ids(2, 1000))


def test_a_resident_never_waits_and_the_one_whose_tool_has_run_longest_makes_room() -> None:
    room = CacheRoom(3000)
    for number in range(3):
        assert room.admit(number, ids(number, 1000))
    for number in (1, 0, 2):
        room.leave(number)
    assert room.admit(2, ids(2, 1500))
    assert [room.is_resident(number) for number in range(3)] == [True, False, True]
    assert not room.admit(1, ids(1, 1000))
    assert room.admit(0, ids(0, 1000))


def test_what_sessions_share_is_counted_once() -> None:
    room = CacheRoom(10 * CHUNK)
    assert all(room.admit(number, ids(number, 8 * CHUNK + 50, shared=8 * CHUNK)) for number in range(10))
    assert room.num_used == 8 * CHUNK + 500
    for number in range(9):
        room.leave(number)
        room.forget(number)
    assert room.num_used == 8 * CHUNK + 50  # the last one needs what they shared


def test_one_that_is_alone_is_admitted_whatever_its_length() -> None:
    room = CacheRoom(1000)
    assert room.admit("long", ids(0, 5000))
    assert not room.admit("short", ids(1, 10))
    room.leave("long")
    assert room.admit("short", ids(1, 10))
    assert not room.is_resident("long")


def test_a_call_that_outlives_its_session_leaves() -> None:
    room = CacheRoom(1000)
    assert room.admit("a", ids(0, 900))
    room.forget("a")
    assert room.num_used == 0
    room.leave("a")
    assert room.admit("b", ids(1, 5000))


actions = st.lists(st.tuples(st.sampled_from(["call", "answer", "end"]), st.integers(0, 7)), max_size=80)


@given(actions, st.integers(0, 4000), st.integers(0, 3))
def test_residents_fit_and_never_do_all_wait(actions: list[tuple[str, int]], capacity: int, num_shared: int) -> None:
    room = CacheRoom(capacity)
    inside: Counter[int] = Counter()
    lengths: dict[int, int] = {}
    for (action, number), step in zip(actions, count(1), strict=False):
        if action == "call":
            shared = num_shared * CHUNK
            length = max(lengths.get(number, 0), shared) + 37 * (step % 11)
            was_resident, was_empty = room.is_resident(number), not inside.total()
            admitted = room.admit(number, ids(number, length, shared))
            assert admitted or not (was_resident or was_empty)
            if admitted:
                inside[number] += 1
                lengths[number] = length
        elif action == "answer" and inside[number]:
            inside[number] -= 1
            room.leave(number)
        elif action == "end" and not inside[number]:
            room.forget(number)
            lengths.pop(number, None)
        # past the room go only those that grew while they were inside, or one alone
        idle = [session for session in range(8) if room.is_resident(session) and not inside[session]]
        assert room.num_used <= capacity or not idle or action != "call"
        assert (room.num_used == 0) == (not any(room.is_resident(s) and lengths.get(s) for s in range(8)))
