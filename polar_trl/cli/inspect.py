"""`polar-trl inspect`: a web page about a run, on this machine."""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError

EPILOG = """\
examples:
  polar-trl inspect runs/first                    prints the address of the page; Ctrl-C ends it
  polar-trl inspect runs/first --open             opens a browser as well
  polar-trl inspect runs/first --port 8123        always the same address, such as for a tunnel:
                                                  ssh -L 8123:127.0.0.1:8123 MACHINE
  polar-trl inspect runs/eval --tokenizer Qwen/Qwen3.5-4B
  polar-trl inspect runs/first runs/second        both, with sessions of one task side by side

RUN is the output folder of a training run, while it goes on or after, of polar-trl eval, or of polar-trl collect. The
page shows curves, sessions, and each session's conversation and tokens; docs/inspect.md says how to read it. It can be
reached from this machine only, works offline, and changes nothing in RUN.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="a local web page about a run: curves, sessions, tokens",
        description="Serve a web page about a run on this machine's loopback address.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", metavar="RUN", nargs="+", type=Path, help="a run's output folder; a second to compare"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (default: a free one)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="folder or hub id of the model's tokenizer (default: the run's model)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl inspect`."""
    import uvicorn

    from polar_trl.tools.inspector.app import build_app
    from polar_trl.tools.inspector.run_folder import RunFolder

    folders = [
        RunFolder(path, args.tokenizer, prefix=f"{number}~" if number else "")
        for number, path in enumerate(args.paths)
    ]
    listener = _listen(args.port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    print(f"polar-trl: {', '.join(map(str, args.paths))} shown at {address} (Ctrl-C ends it)", flush=True)
    for folder in folders:
        if not folder.vocabulary.is_known:
            print(f"polar-trl: {folder.vocabulary.note}", file=sys.stderr)
        elif folder.settings_problem is not None:
            print(f"polar-trl: {folder.settings_problem}", file=sys.stderr)
    if args.open:
        import webbrowser

        webbrowser.open(address)
    config = uvicorn.Config(
        build_app(*folders), lifespan="on", access_log=False, log_level="warning", timeout_graceful_shutdown=2
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # the way to end it
    finally:
        listener.close()
    return 0


def _listen(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; give a number up to 65535, or leave it out for a free one")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # the error's own text names the address as well
        raise ConfigError(f"cannot listen on port {port} ({reason}); choose another, or none") from error
