"""Connections of agents: how many, how slow, how large the head of a request, and to whom they belong."""

import gc
import os
import socket
import struct
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest
from attacks import Target, ask, read_status
from serving import CHAT, HELLO, GatedEngine, http, new_log, say, serve, wait_until

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.serving import connections
from polar_trl.types import Endpoint


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with serve(ScriptedEngine(lambda _: say("hi"))) as proxy:
        yield proxy


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_INTERVAL_S", 0.02)


def aim(endpoint: Endpoint) -> Target:
    host, port = endpoint.origin.removeprefix("http://").split(":")
    return Target(address=(host, int(port)), key=endpoint.api_key)


def open_on_own_listener(proxy: Proxy, log: SessionLog, limits: SessionLimits = SessionLimits()) -> Target:
    listener = socket.create_server(("127.0.0.1", 0))
    return aim(proxy.open_session(log, limits, listener=listener))


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while block := connection.recv(1 << 16):
            received += block
    return received


@pytest.mark.parametrize("has_own_listener", [False, True])
@pytest.mark.parametrize("part", ["nothing", "half a head", "half a body"])
def test_a_request_that_does_not_come_is_timed_out(
    quick_sweeps: None, monkeypatch: pytest.MonkeyPatch, proxy: Proxy, has_own_listener: bool, part: str
) -> None:
    monkeypatch.setattr(connections, "BODY_SWEEPS", 10)
    log = new_log()
    target = open_on_own_listener(proxy, log) if has_own_listener else aim(proxy.open_session(log))
    head = target.head(100)
    with target.connect() as connection:
        connection.sendall({"nothing": b"", "half a head": head[:-9], "half a body": head + b"{"}[part])
        assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")
    is_known = part != "nothing" and (has_own_listener or part == "half a body")
    assert log.counters == ({"refused_http": 1} if is_known else {})
    assert target.post(ask()) == 200


def test_a_connection_with_a_key_waits_for_the_next_request_and_for_its_reply(quick_sweeps: None) -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        target = aim(proxy.open_session(new_log()))
        with target.connect() as idle, target.connect() as waiting, target.connect() as stranger:
            waiting.sendall(target.head(len(ask())) + ask())
            engine.entered.acquire()
            # more sweeps than a stranger is given
            assert read_to_end(stranger).startswith(b"HTTP/1.1 408 ")
            engine.gate.set()
            assert read_status(waiting) == 200
            idle.close()
            with target.connect() as second_stranger:
                assert read_to_end(second_stranger).startswith(b"HTTP/1.1 408 ")
            waiting.sendall(target.head(len(ask())) + ask())
            assert read_status(waiting) == 200


@pytest.mark.parametrize("has_own_listener", [False, True])
def test_one_connection_too_many_ends_its_session_and_no_other(proxy: Proxy, has_own_listener: bool) -> None:
    log, other = new_log(), http(proxy.open_session(new_log("other")))
    limits = SessionLimits(max_connections=5)
    target = open_on_own_listener(proxy, log, limits) if has_own_listener else aim(proxy.open_session(log, limits))
    with ExitStack() as stack:
        for number in range(6):
            connection = stack.enter_context(target.connect())
            with suppress(ConnectionError):
                connection.sendall(target.head(len(ask())) + ask())
                assert read_status(connection) in (200, 403 if number == 5 else 200)
                connection.sendall(b"POST ")  # it is not idle
        wait_until(lambda: log.exceeded == "connections")
        with other:
            assert other.post(CHAT, json={"messages": HELLO}).status_code == 200
    assert target.post(ask()) in (0, 403)
    assert log.counters["connections_exceeded"] == 1 and len(log.calls) == 2  # the second after three replays


@pytest.mark.parametrize("has_own_listener", [False, True])
def test_connections_that_an_agent_left_idle_give_way(proxy: Proxy, has_own_listener: bool) -> None:
    log, limits = new_log(), SessionLimits(max_connections=5)
    target = open_on_own_listener(proxy, log, limits) if has_own_listener else aim(proxy.open_session(log, limits))
    with ExitStack() as stack:
        left: list[socket.socket] = []
        for number in range(20):
            left.append(stack.enter_context(target.connect()))
            body = ask(f"call {number}")
            left[-1].sendall(target.head(len(body)) + body)
            assert read_status(left[-1]) == 200
        assert [read_to_end(connection) for connection in left[:15]] == [b""] * 15
        left[-1].sendall(target.head(len(ask("more"))) + ask("more"))
        assert read_status(left[-1]) == 200
    assert log.exceeded == "" and len(log.calls) == 21


def test_sessions_with_modest_bodies_do_not_pay_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BODY_BYTES_HELD", 3_000)
    monkeypatch.setattr(connections, "MODEST_BODY_BYTES", 2_000)
    engine = GatedEngine()
    engine.max_model_len = 10_000
    with serve(engine) as proxy, ExitStack() as stack:
        logs = [new_log(f"s{number}") for number in range(8)]
        asked = []
        for number, log in enumerate(logs):
            target = open_on_own_listener(proxy, log)
            asked.append(stack.enter_context(target.connect()))
            body = ask("x" * (2_500 if number == 7 else 700))
            asked[-1].sendall(target.head(len(body)) + body)
            if number < 7:
                engine.entered.acquire()
        wait_until(lambda: logs[7].exceeded == "memory")
        engine.gate.set()
        assert [read_status(connection) for connection in asked[:7]] == [200] * 7
    assert [log.exceeded for log in logs[:7]] == [""] * 7


def test_the_oldest_without_a_key_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNAUTHENTICATED", 3)
    with serve(ScriptedEngine(lambda _: say("hi"))) as proxy:
        target = aim(proxy.open_session(log := new_log()))
        with ExitStack() as stack:
            known = stack.enter_context(target.connect())
            known.sendall(target.head(len(ask())) + ask())
            assert read_status(known) == 200
            others = [stack.enter_context(target.connect()) for _ in range(4)]
            assert read_to_end(others[0]) == b""
            for connection in (known, *others[1:]):
                connection.sendall(target.head(len(ask())) + ask())
                assert read_status(connection) == 200
    assert log.exceeded == ""


def test_the_session_with_most_connections_pays_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "raise_open_file_limit", lambda: 24)
    monkeypatch.setattr("polar_trl.proxy.raise_open_file_limit", lambda: 24)
    with serve(ScriptedEngine(lambda _: say("hi"))) as proxy, ExitStack() as stack:
        logs = [new_log(name) for name in ("modest", "greedy")]
        targets = [open_on_own_listener(proxy, log) for log in logs]
        for target, number in ((targets[0], 3), (targets[1], 10)):
            for _ in range(number):
                stack.enter_context(target.connect())
        wait_until(lambda: logs[1].exceeded == "connections")
        assert logs[0].exceeded == "" and targets[0].post(ask()) == 200


def test_a_listener_serves_the_key_of_its_own_session_only(proxy: Proxy) -> None:
    own = open_on_own_listener(proxy, new_log())
    other = proxy.open_session(log := new_log("other"))
    assert own.post(ask(), key=other.api_key) == 401
    assert log.calls == ()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (["X-A: " + "y" * 400_000], b"400"),
        ([f"X-{number}: y" for number in range(300)], b"400"),
        ([f"X-{number}: y" for number in range(100)], b"200"),
    ],
)
def test_a_head_has_a_largest_size(proxy: Proxy, head: list[str], status: bytes) -> None:
    target = aim(proxy.open_session(new_log()))
    with target.connect() as connection:
        connection.sendall(target.head(len(ask()), "Connection: close", *head))
        with suppress(ConnectionError):
            connection.sendall(ask())
        assert read_to_end(connection).split()[1] == status


WHOLE = b"%x\r\n%b\r\n0\r\n" % (len(ask()), ask())


@pytest.mark.parametrize(
    ("start", "rest"), [(WHOLE + b"X-A: ", b"y"), (b"", b"1\r\n{\r\n"), (b"1;x=", b"y"), (b"", b"0")]
)
def test_what_is_around_a_body_has_a_largest_size(proxy: Proxy, start: bytes, rest: bytes) -> None:
    target = aim(proxy.open_session(log := new_log()))
    with target.connect() as connection:
        connection.sendall(target.head(None) + start)
        with pytest.raises(ConnectionError):
            connection.sendall(rest * (40_000_000 // len(rest)))
    assert "internal_errors" not in log.counters and target.post(ask()) == 200


def test_empty_lines_between_requests_are_cut_off(proxy: Proxy) -> None:
    target = aim(proxy.open_session(new_log()))
    with target.connect() as connection:
        connection.sendall(target.head(len(ask())) + ask())
        assert read_status(connection) == 200
        with pytest.raises(ConnectionError):
            connection.sendall(b"\r\n" * 20_000_000)


def test_bodies_in_ordinary_chunks_are_read(proxy: Proxy) -> None:
    target = aim(proxy.open_session(log := new_log()))
    with target.connect() as connection:
        for number in range(5):
            body = ask("a", unread="x" * (2_000_000 + number))
            parts = [body[start : start + 1000] for start in range(0, len(body), 1000)]
            connection.sendall(target.head(None) + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts))
            connection.sendall(b"0\r\n\r\n")
            assert read_status(connection) == 200
    assert len(log.calls) >= 1


def test_a_head_without_end_is_cut_off(proxy: Proxy) -> None:
    target = aim(proxy.open_session(new_log()))
    with target.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(target.head(0)[:-2] + b"X-A: ")
        for _ in range(1000):
            connection.sendall(b"y" * 100_000)


def test_requests_may_not_pile_up_on_a_connection() -> None:
    engine = GatedEngine()
    with serve(engine) as proxy:
        target = aim(proxy.open_session(log := new_log()))
        with target.connect() as connection:
            connection.sendall((target.head(len(ask())) + ask()) * 50)
            assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")
        engine.gate.set()
        assert target.post(ask("another")) == 200
    assert log.counters.keys() <= {"calls_aborted"}


def test_all_requests_of_a_session_are_counted(proxy: Proxy) -> None:
    log = new_log()
    target = open_on_own_listener(proxy, log, SessionLimits(max_calls=2))
    with httpx.Client(base_url="http://{}:{}".format(*target.address)) as agent, suppress(httpx.HTTPError):
        for _ in range(1000):
            agent.post(CHAT, content=ask(), headers={"authorization": f"Bearer {target.key}"})
    assert log.exceeded == "requests" and log.counters["retries_replayed"] < 240


def test_nothing_of_a_session_is_kept_after_its_end(quick_sweeps: None, proxy: Proxy) -> None:
    endpoint = proxy.open_session(new_log())
    target = aim(endpoint)
    with ExitStack() as stack:
        unread = stack.enter_context(target.connect())
        unread.sendall(target.head(len(ask(stream=True))) + ask(stream=True))
        half = stack.enter_context(target.connect())
        half.sendall(target.head(1000) + b"{")
        idle = stack.enter_context(target.connect())
        idle.sendall(target.head(len(ask())) + ask())
        assert read_status(idle) == 200
        (session,) = proxy._sessions.values()
        kept = weakref.ref(session)
        del session
        proxy.close_session(endpoint.api_key)
        for connection in (unread, half, idle):
            read_to_end(connection)
        wait_until(lambda: not proxy._connections._open and not proxy._server.server_state.tasks)
        gc.collect()
        assert kept() is None


def test_a_connection_that_was_reset_keeps_nothing_of_its_session(proxy: Proxy) -> None:
    endpoint = proxy.open_session(new_log())
    target = aim(endpoint)
    with target.connect() as connection:
        connection.sendall(target.head(len(ask())) + ask())
        assert read_status(connection) == 200
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close it by a reset
    wait_until(lambda: not proxy._connections._open)
    (session,) = proxy._sessions.values()
    kept = weakref.ref(session)
    del session
    proxy.close_session(endpoint.api_key)
    gc.collect()
    assert kept() is None


def test_the_limit_of_open_files_is_raised_and_shared_out() -> None:
    script = """
    import resource
    from serving import serve
    from polar_trl.engine.scripted import ScriptedEngine
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 700))
    with serve(ScriptedEngine([])) as proxy:
        print(resource.getrlimit(resource.RLIMIT_NOFILE), proxy._connections._max_open)
    """
    assert run_script(script) == "(700, 700) 350"


def test_a_proxy_without_files_serves_again_once_there_are_some() -> None:
    script = """
    import os, resource, socket
    from attacks import Target, ask
    from serving import new_log, say, serve, wait_until
    from test_connections import aim
    from polar_trl.engine.scripted import ScriptedEngine
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    with serve(ScriptedEngine(lambda _: say("hi"))) as proxy:
        target = aim(proxy.open_session(new_log()))
        assert target.post(ask()) == 200
        waiting, taken = socket.socket(), []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            waiting.settimeout(1)
            waiting.connect(target.address)
            try:
                waiting.sendall(target.head(len(ask())) + ask())
                print("served" if waiting.recv(10) else "closed", end=" ")
            except OSError:
                print("closed", end=" ")
        for number in taken:
            os.close(number)
        waiting.close()
        wait_until(lambda: target.post(ask()) == 200)
        print("served")
    """
    assert run_script(script) == "closed served"


def run_script(script: str) -> str:
    folders = os.pathsep.join([*sys.path, os.path.dirname(__file__)])
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
