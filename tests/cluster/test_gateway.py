"""The way of a node's connections to the trainer: tokens, certificates, and ends that are noticed."""

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from ssl import Purpose

import pytest

from polar_trl.cluster import gateway as gateway_module
from polar_trl.cluster.gateway import Gateway, Route
from polar_trl.cluster.relay import Loop, Relay, build_tls, hold_line
from polar_trl.errors import ConfigError

LOOP = Loop("test-relay")


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    opened = Gateway("127.0.0.1", None)
    yield opened
    opened.stop()


def echo(listener: socket.socket) -> None:
    """Answer one connection at a time with what it sends."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while block := connection.recv(1 << 16):
                    connection.sendall(block)

    threading.Thread(target=serve, daemon=True).start()


def relay_to(gateway: Gateway, token: bytes, tls: ssl.SSLContext | None = None) -> tuple[Relay, tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    return Relay(LOOP, listener, gateway.address, token, tls), address


def ask(address: tuple[str, int], message: bytes) -> bytes:
    with socket.create_connection(address, timeout=60) as connection:
        answer = b""
        with suppress(ConnectionResetError):  # so it ends where what was sent had not been read
            connection.sendall(message)
            while len(answer) < len(message) and (block := connection.recv(1 << 16)):
                answer += block
        return answer


def test_a_session_gets_to_its_own_route(gateway: Gateway) -> None:
    routes = [gateway.open_route() for _ in range(2)]
    for route in routes:
        echo(route.listen())
    message = os.urandom(1 << 20)
    relays = [relay_to(gateway, route.token) for route in routes]
    assert [ask(address, message) == message for _, address in relays] == [True, True]
    gateway.shut(routes[0])
    assert ask(relays[0][1], b"x") == b""
    assert ask(relays[1][1], b"x") == b"x"
    for relay, _ in relays:
        relay.close()


def read_end(gateway: Gateway, sent: bytes) -> bytes:
    with socket.create_connection(gateway.address, timeout=60) as connection:
        connection.sendall(sent)
        try:
            return connection.recv(1)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "change", [lambda token: b"GET / HTTP/1.1\r\n" + bytes(40), lambda token: token[:-1] + bytes([token[-1] ^ 1])]
)
def test_a_wrong_token_ends_the_connection(gateway: Gateway, change: Callable[[bytes], bytes]) -> None:
    route = gateway.open_route()
    route.listen()  # accepts nobody: a connection that got there would hang
    assert read_end(gateway, change(route.token)) == b""


def test_who_says_nothing_is_sent_away(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "TOKEN_TIMEOUT_S", 0.2)
    assert read_end(gateway, b"abc") == b""


def test_a_connection_that_cannot_be_made_is_remembered() -> None:
    closed = Gateway("127.0.0.1", None)
    closed.stop()
    relay, address = relay_to(closed, b"x" * 48)
    assert ask(address, b"x") == b""
    assert "ConnectionRefusedError" in relay.failure
    relay.close()


def test_both_ends_of_a_line_hear_of_its_end(gateway: Gateway) -> None:
    lost, ended = threading.Event(), threading.Event()
    line = gateway.open_line(lost.set)
    hold_line(gateway.address, line.token, None, ended.set)
    gateway.shut(line)
    assert ended.wait(60)
    assert not lost.is_set()  # by our own will
    other = gateway.open_line(lost.set)
    with socket.create_connection(gateway.address) as connection:
        connection.sendall(other.token)
    assert lost.wait(60)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of two authorities: own and ca, stranger and other."""
    folder = tmp_path_factory.mktemp("keys")
    new = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    for authority, name in (("ca", "own"), ("other", "stranger")):
        files = [("-keyout", f"{folder}/{one}.key", "-out", f"{folder}/{one}.pem") for one in (authority, name)]
        subprocess.run([*new, "-subj", f"/CN={authority}", *files[0]], check=True, capture_output=True)
        signed = ("-CA", f"{folder}/{authority}.pem", "-CAkey", f"{folder}/{authority}.key")
        more = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
        subprocess.run([*new, "-subj", f"/CN={name}", *more, *signed, *files[1]], check=True, capture_output=True)
    return folder


def use_keys(patch: pytest.MonkeyPatch, keys: Path, name: str, authority: str) -> None:
    patch.setenv("RAY_USE_TLS", "1")
    patch.setenv("RAY_TLS_SERVER_CERT", f"{keys}/{name}.pem")
    patch.setenv("RAY_TLS_SERVER_KEY", f"{keys}/{name}.key")
    patch.setenv("RAY_TLS_CA_CERT", f"{keys}/{authority}.pem")


@pytest.mark.parametrize(
    ("name", "authority", "reaches"),
    [("own", "ca", True), ("stranger", "ca", False), ("own", "other", False), (None, "ca", False)],
)
def test_certificates_are_asked_of_both_sides(
    monkeypatch: pytest.MonkeyPatch, keys: Path, name: str | None, authority: str, reaches: bool
) -> None:
    use_keys(monkeypatch, keys, "own", "ca")
    gateway = Gateway("127.0.0.1", build_tls(Purpose.CLIENT_AUTH))
    route: Route = gateway.open_route()
    echo(route.listen())
    if name is None:
        tls = ssl.create_default_context(cafile=f"{keys}/{authority}.pem")
    else:
        use_keys(monkeypatch, keys, name, authority)
        found = build_tls(Purpose.SERVER_AUTH)
        assert found is not None
        tls = found
    relay, address = relay_to(gateway, route.token, tls)
    assert ask(address, b"hello") == (b"hello" if reaches else b"")
    relay.close()
    gateway.stop()


def test_plain_text_does_not_get_through_a_gateway_with_certificates(
    monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    use_keys(monkeypatch, keys, "own", "ca")
    gateway = Gateway("127.0.0.1", build_tls(Purpose.CLIENT_AUTH))
    route = gateway.open_route()
    echo(route.listen())
    relay, address = relay_to(gateway, route.token, None)
    assert b"hello" not in ask(address, b"hello")
    relay.close()
    gateway.stop()


def test_certificates_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    use_keys(monkeypatch, keys, "own", "ca")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", "/nowhere.key")
    with pytest.raises(ConfigError, match=r"certificates of RAY_TLS_\* cannot be read"):
        build_tls(Purpose.CLIENT_AUTH)
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(ConfigError, match="RAY_USE_TLS is set, and RAY_TLS_CA_CERT is not"):
        build_tls(Purpose.CLIENT_AUTH)


def test_the_gateway_is_bound_to_one_address_and_refuses_others(gateway: Gateway) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        Gateway("203.0.113.1", None)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", gateway.address[1]), timeout=5)


def test_silence_ends_a_connection_in_bounded_time() -> None:
    """A peer whose packets are dropped, as of a machine that is cut off, is noticed by the kernel's probes."""
    from polar_trl.cluster.relay import PROBE_S, SILENCE_S, set_probes

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        set_probes(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        count = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert PROBE_S * (1 + count) == SILENCE_S
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * SILENCE_S
