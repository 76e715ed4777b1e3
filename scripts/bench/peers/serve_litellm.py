"""Serve LiteLLM's proxy in front of an engine; run with the Python of LiteLLM's own environment.

Real: its command, one worker, one key and no database. It keeps no token ids, so it has no rows. Arguments: the
engine's base URL.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from peers.control import obey


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    parameters = {"model": "hosted_vllm/policy", "api_base": sys.argv[1], "api_key": "none"}
    config = {"model_list": [{"model_name": "policy", "litellm_params": parameters}]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(Path(sys.executable).parent / "litellm"), "--config", str(path), "--port", str(port)]
        key = f"sk-{secrets.token_hex(16)}"
        env = {**os.environ, "LITELLM_MASTER_KEY": key, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with subprocess.Popen(
            [*command, "--host", "127.0.0.1"], env=env, stdout=subprocess.DEVNULL, cwd=folder
        ) as server:
            try:
                wait_until_up(f"http://127.0.0.1:{port}/health/liveliness", server)
                obey(f"http://127.0.0.1:{port}", {"open": lambda: key, "close": lambda key: None}, server.pid)
            finally:
                server.kill()


def wait_until_up(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the proxy did not come up")


main()
