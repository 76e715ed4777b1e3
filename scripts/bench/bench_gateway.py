#!/usr/bin/env python3
"""Measure what the gateway of sandbox_cluster adds to a model call: latency, and processor time of the trainer.

A call sends --body-kb and gets 2 KB back, on a connection of its own; so many agents as --concurrency says are at it.
"direct" goes to the proxy's socket without a gateway. What answers is no proxy: it reads the body, and that is all.
Agents and their relays are in a process of their own, on this machine, so that no network is measured.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ssl import Purpose

from polar_trl.cluster.gateway import Gateway
from polar_trl.cluster.relay import TLS_VARIABLES, Loop, Relay, build_tls

REPLY = bytes(2048)


def serve(listener: socket.socket, size: int) -> None:
    """Answer calls until the listener is closed."""

    def answer(connection: socket.socket) -> None:
        with connection:
            read_all(connection, size)
            connection.sendall(REPLY)

    with ThreadPoolExecutor(64) as answering:
        while True:
            answering.submit(answer, listener.accept()[0])


def read_all(connection: socket.socket, size: int) -> None:
    """Read so many bytes."""
    while size > 0 and (block := connection.recv(min(size, 1 << 16))):
        size -= len(block)


def run_agents(where: str, token: str, size: int, calls: int, concurrency: int) -> None:
    """Print the seconds of each call, as the process of a node."""
    connect: Callable[[], socket.socket]
    if token:
        host, port = where.split(":")
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        address = listener.getsockname()
        Relay(Loop("relay"), listener, (host, int(port)), bytes.fromhex(token), build_tls(Purpose.SERVER_AUTH))

        def connect() -> socket.socket:
            return socket.create_connection(address)
    else:

        def connect() -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(where)
            return connection

    def call(_: int) -> float:
        began = time.perf_counter()
        with connect() as connection:
            connection.sendall(bytes(size))
            read_all(connection, len(REPLY))
        return time.perf_counter() - began

    with ThreadPoolExecutor(concurrency) as agents:
        print(*agents.map(call, range(calls)))


def measure(way: tuple[str, str], sizes: list[str], calls: int) -> str:
    """Run the agents; return a row's cells."""
    began = time.process_time()
    printed = subprocess.run(
        [sys.executable, __file__, "--agents", *way, *sizes], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    cpu_ms = 1000 * (time.process_time() - began) / calls
    seconds = sorted(1000 * float(word) for word in printed.split())
    return f"{cpu_ms:.2f} ms | {statistics.median(seconds):.1f} / {seconds[int(0.95 * len(seconds))]:.1f} ms"


def use_certificates(folder: str) -> None:
    """Make a certificate that is its own authority, and set Ray's variables."""
    names = ("-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", f"{folder}/own.key", "-out", f"{folder}/own.pem")
    new = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    subprocess.run([*new, *names, *files], check=True, capture_output=True)
    paths = (f"{folder}/own.pem", f"{folder}/own.key", f"{folder}/own.pem")
    os.environ |= {"RAY_USE_TLS": "1", **dict(zip(TLS_VARIABLES, paths, strict=True))}


def main() -> None:
    """Print a table."""
    if sys.argv[1:2] == ["--agents"]:
        where, token, *sizes = sys.argv[2:]
        return run_agents(where, token, *map(int, sizes))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body-kb", type=int, default=100)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=1)
    args = parser.parse_args()
    sizes = [str(number) for number in (args.body_kb * 1024, args.calls, args.concurrency)]
    print(
        f"{args.calls} calls of {args.body_kb} KB, {args.concurrency} at a time; load average {os.getloadavg()[0]:.0f}"
    )
    print("\n| way | CPU of the trainer's process per call | p50 / p95 of a call |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("direct", "gateway", "gateway with TLS"):
            if name.endswith("TLS"):
                use_certificates(folder)
            gateway = Gateway("127.0.0.1", build_tls(Purpose.CLIENT_AUTH))
            route = gateway.open_route()
            threading.Thread(target=serve, args=(route.listen(), args.body_kb * 1024), daemon=True).start()
            way = (f"127.0.0.1:{gateway.address[1]}", route.token.hex()) if name != "direct" else (str(route.path), "")
            print(f"| {name} | {measure(way, sizes, args.calls)} |", flush=True)
            gateway.stop()
    return None


if __name__ == "__main__":
    main()
