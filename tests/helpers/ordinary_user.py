"""Print what an ordinary user sees of a sandbox, as JSON; run by `test_unprivileged`.

Arguments: bwrap, docker, doomed, image and an archive, node and an image, or swe and an archive and its base commit.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from serving import HELLO, PARAMS, say

from polar_trl.cache import find_cache
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import SandboxError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.owner import list_mounts
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Endpoint, Task

LIMITS = Limits(memory_mb=200, cpus=1.0, pids=64, disk_mb=64)
HOME = Path(os.environ["HOME"])
STATE = HOME / "state"
CONNECT = "import socket; socket.create_connection(({!r}, {}), 3)"
BOMB = """
import os, time
held = 0
for number in range(200):  # the limit under test is 64
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except BlockingIOError:
        held += 1
print(held, flush=True)
os._exit(0)
"""
ASK = f"""
import json, os, urllib.request
body = json.dumps({{"messages": {HELLO!r}}}).encode()
headers = {{"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}}
request = urllib.request.Request(os.environ["ORIGIN"] + "/v1/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"])
"""


NODE_ASK = f"""
const headers = {{authorization: "Bearer " + process.env.KEY, "content-type": "application/json"}};
const body = JSON.stringify({{messages: {json.dumps(HELLO)}}});
fetch(process.env.ORIGIN + "/v1/chat/completions", {{method: "POST", headers, body}})
  .then((reply) => reply.json()).then((reply) => console.log(reply.choices[0].message.content));
"""


def main() -> None:
    """A whole session's worth; with "node" what an image without Python can do; with "doomed" no end of it."""
    if sys.argv[1] == "doomed":
        box = build("bwrap").create(Task(id="t", instruction="x"), "doomed")
        box.run("setsid sleep 600 & echo running > /dev/stderr; touch started; sleep 600", env={}, timeout_s=600)
    print(json.dumps(USES.get(sys.argv[1], use_all)(*sys.argv[1:])))


def use_node(_: str, image: str) -> dict[str, Any]:
    from polar_trl.sandbox.docker.backend import DockerSandboxBackend

    found: dict[str, Any] = {}
    backend = DockerSandboxBackend(image=image, limits=LIMITS, root=STATE, mounts=[find_cache("agents")])
    try:
        box = backend.create(Task(id="t", instruction="x", files={"ask.js": NODE_ASK}), "s")
    except SandboxError as error:
        found["refusal"] = str(error)
    else:
        log = SessionLog(session_id="s", task_id="t", group_id="g")
        with Proxy(ScriptedEngine([say("hi there")]), ByteRenderer(), params=PARAMS) as proxy:
            endpoint = proxy.open_session(log, listener=box.open_listener())
            env = {"ORIGIN": endpoint.origin, "KEY": endpoint.api_key}
            node = f"{find_cache('agents')}/node-*/node_modules/.bin/node"
            for name, script in (("model", f"{node} ask.js"), ("late", "sleep 60"), ("again", f"{node} ask.js")):
                result = box.run(script, env=env, timeout_s=3 if name == "late" else 60)
                found[name] = [result.exit_code, result.stdout, result.timed_out]
        box.destroy()
    found["left"] = [path.name for path in STATE.iterdir()]
    return found


def use_swe(_: str, archive: str, base_commit: str) -> dict[str, Any]:
    """Sessions of Pi on a row in its image, that fix it and that do not, graded by hidden tests in fresh sandboxes."""
    from swe_repository import FIX, build_task

    from polar_trl.engine.base import GenerationParams
    from polar_trl.grade.by_task import GraderByTask
    from polar_trl.harness.pi import PiHarness
    from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
    from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
    from polar_trl.tools.doctor import MAX_MODEL_LEN, RENDERER, answer_by_turn
    from polar_trl.types import Message

    task, pi = replace(build_task(base_commit), image=archive), PiHarness()
    backend = BwrapSandboxBackend(root=STATE, mounts=pi.folders)
    backend.prepare([task])
    found: dict[str, Any] = {"sessions": []}
    for command in (f"git apply - <<'END'\n{FIX}END", "true"):
        # as eval scripts do, it writes to the image too
        write = "mkdir /opt/new && touch /usr/bin/new && rm /usr/bin/gzip && "
        calls = (pi.build_shell_call(write + command),)
        replies = [Message(role="assistant", tool_calls=calls), Message(role="assistant", text="Done.")]
        engine = ScriptedEngine(answer_by_turn(replies), max_model_len=MAX_MODEL_LEN)
        with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=4096)) as proxy:
            runner = RolloutRunner(
                proxy=proxy, backend=backend, harness=pi, grader=GraderByTask(backend), config=RolloutConfig()
            )
            rollout = runner.run([Job(rollout_id="r", group_id="g", task=task)])[0].rollout
        found["sessions"].append([rollout.error, rollout.stop_reason, len(rollout.calls), rollout.reward])
    found["left"] = [path.name for path in STATE.iterdir()]
    return found


def use_all(kind: str, image: str | None = None) -> dict[str, Any]:
    report: dict[str, Any] = {"uid": os.getuid()}
    tree = HOME / "tree"
    tree.mkdir()
    (tree / "m.py").write_text("old\n")
    backend = build(kind, image)
    report["capabilities"] = asdict(backend.capabilities)
    task = Task(id="t", instruction="x", files={"a/b.txt": "hello\n"}, workspace=str(tree))
    box = backend.create(task, "s/1")
    try:
        report |= use(box)
    finally:
        box.destroy()
        box.destroy()
    report["tree"] = (tree / "m.py").read_text()
    report["left"] = [path.name for path in STATE.iterdir()] + list(list_mounts(HOME / "state"))
    report["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return report


def build(kind: str, image: str | None = None) -> SandboxBackend:
    if kind in ("bwrap", "image"):
        from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend

        return BwrapSandboxBackend(limits=LIMITS, root=STATE, image=image)
    from polar_trl.sandbox.docker.backend import DockerSandboxBackend

    return DockerSandboxBackend(limits=LIMITS, root=STATE, image="polar-trl-test:latest")


def use(box: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def run(name: str, command: str, timeout_s: float = 30.0, **env: str) -> ExecResult:
        result = box.run(command, env=env, timeout_s=timeout_s)
        found[name] = [result.exit_code, result.stdout, result.timed_out]
        return result

    run("basics", "pwd; cat a/b.txt m.py; echo $HOME $X; echo new > m.py; id -u; exit 3", X="1")
    run("privilege", "grep -E 'CapEff|NoNewPrivs' /proc/self/status; touch /usr/planted 2>/dev/null || echo no")
    for name, content in {".agent/settings": b"\0\xff", "ask.py": ASK.encode(), "bomb.py": BOMB.encode()}.items():
        box.put(f"~/{name}", content)
    run("files", "cat ~/.agent/settings > both; ln -s /etc/passwd out; echo x > /tmp/x")
    found["got"] = [list(box.get("both") or b""), box.get("out") is None, (box.host_workdir / "m.py").read_text()]
    run("deadline", "trap '' TERM INT HUP; echo started; while :; do sleep 0.1; done", 1)
    daemon = "trap '' TERM HUP; while :; do date +%s%N >> alive; sleep 0.02; done"
    run("daemon", f'setsid bash -c "(exec >/dev/null 2>&1; {daemon}) &"; until [ -s alive ]; do sleep 0.05; done')
    before = box.get("alive")
    time.sleep(0.3)
    found["daemon_is_dead"] = bool(before) and box.get("alive") == before
    timer = threading.Timer(0.5, box.kill)
    timer.start()
    run("killed", "sleep 60", 60)
    run("bomb", "python3 ~/bomb.py")
    hog = run("hog", "exec python3 -c 'x = bytearray(500 << 20)'")
    found["out_of_memory"] = hog.out_of_memory
    run("again", "echo again")
    talk(box, run)
    return found


def talk(box: Sandbox, run: Any) -> None:
    """To the model, and to nobody else."""
    log = SessionLog(session_id="s", task_id="t", group_id="g")
    with Proxy(ScriptedEngine([say("hi there")]), ByteRenderer(), params=PARAMS) as proxy:
        endpoint: Endpoint = proxy.open_session(log, listener=box.open_listener())
        env = {"ORIGIN": endpoint.origin, "KEY": endpoint.api_key}
        run("origin", 'echo "$ORIGIN"', **env)
        run("model", "python3 ~/ask.py", **env)
        run("late", "python3 ~/ask.py; sleep 60", 5.0, **env)
        run("model_after_the_deadline", "python3 ~/ask.py", **env)
        for name, host, port in (("other_port", "127.0.0.1", 22), ("away", "10.0.0.1", 80)):
            run(name, f'python3 -c "{CONNECT.format(host, port)}" 2>&1 | tail -1')
        proxy.close_session(endpoint.api_key)
    run("gone", "python3 ~/ask.py 2>&1 | tail -1", **env)


USES: dict[str, Callable[..., dict[str, Any]]] = {"node": use_node, "swe": use_swe}


if __name__ == "__main__":
    main()
