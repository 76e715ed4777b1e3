"""Test that what a trainer holds open is closed, once, whoever forgets to."""

import gc
import subprocess
import sys
import threading

import pytest

from polar_trl.errors import ConfigError
from polar_trl.grpo.run.open_parts import OpenParts, close_all


class Owner:
    """May be referred to weakly."""


def open_two(owner: Owner, closed: list[str]) -> OpenParts:
    parts = OpenParts(owner)
    for name in ("engine", "proxy"):
        parts.add(name, lambda name=name: closed.append(name))
    return parts


def test_the_newest_is_closed_first_and_each_once() -> None:
    owner, closed = Owner(), list[str]()
    parts = open_two(owner, closed)
    assert parts
    parts.require()
    parts.close()
    parts.close()
    assert closed == ["proxy", "engine"] and not parts
    with pytest.raises(ConfigError, match="this trainer is closed; build another one"):
        parts.require()


def test_all_are_closed_where_one_fails() -> None:
    owner, closed = Owner(), list[str]()
    parts = open_two(owner, closed)
    parts.add("runner", lambda: [][0])
    with pytest.raises(IndexError):
        parts.close()
    assert closed == ["proxy", "engine"]


def test_garbage_is_closed_on_a_thread_of_its_own() -> None:
    ended = threading.Event()
    owner = Owner()
    where: list[str] = []
    parts = OpenParts(owner)
    parts.add("engine", lambda: (where.append(threading.current_thread().name), ended.set()))
    del owner
    gc.collect()
    assert ended.wait(20)
    assert where == ["polar-close"]


def test_the_next_trainer_closes_the_one_before_but_for_what_it_goes_on_to_use() -> None:
    owner, closed = Owner(), list[str]()
    open_two(owner, closed)
    close_all(but="engine")
    assert closed == ["proxy"]


def test_the_end_of_the_process_closes() -> None:
    code = """
from polar_trl.grpo.run.open_parts import OpenParts
class Owner: pass
owner = Owner()
OpenParts(owner).add("engine", lambda: print("closed"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "closed\n"
