#!/usr/bin/env python3
"""A small coding agent: asks a model for one shell command, runs it, and asks again if it failed.

With --each-line it goes on with the next line of the instruction, in the same conversation.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=key OPENAI_MODEL=name \\
        python3 -I -S shell_agent.py "Create an empty file named notes.txt"

Standard library only, and knows nothing of training. Exit codes: 0 a command succeeded, 1 none did for a request, 2 no
answer.
"""

import argparse
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

SYSTEM = "You control a Linux shell. Answer with one command in a bash code block."
DEMONSTRATIONS = (
    ("Run this shell command: mkdir box", "mkdir box"),
    ("Copy the file map.txt to plan.txt", "cp map.txt plan.txt"),
    ("Create an empty file named desk.txt", "touch desk.txt"),
    ("Write the word pear into the file list.txt", "echo pear > list.txt"),
)
OUTPUT_LIMIT = 400
KEPT_BYTES = 64 * 1024
TIME_LIMIT_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instruction")
    parser.add_argument("--max-turns", type=int, default=3, help="commands to try (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="length of one answer; the server's own limit if not given")
    parser.add_argument("--each-line", action="store_true", help="each line of the instruction is a request")
    parser.add_argument("--shots", type=int, default=1, help="demonstrations in the prompt (default: %(default)s)")
    args = parser.parse_args()

    messages = [{"role": "system", "content": SYSTEM}]
    for question, command in DEMONSTRATIONS[: args.shots]:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"```bash\n{command}\n```"})
    requests = args.instruction.splitlines() if args.each_line else [args.instruction]
    return max([work(messages, request, args.max_turns, args.max_tokens) for request in requests], default=0)


def work(messages, question, max_turns, max_tokens):
    """Ask until a command succeeds, in the conversation so far. 0 if one did, and 1 if none."""
    for _ in range(max_turns):
        messages.append({"role": "user", "content": question})
        reply = ask(messages, max_tokens)
        messages.append({"role": "assistant", "content": reply})
        command = read_command(reply)
        if command is None:
            problem = "There was no bash code block."
        else:
            exit_code, output = run(command)
            if exit_code == 0:
                return 0
            problem = f"Exit code {exit_code}: {output}"
        question = f"{problem} Try again."
    print(f"shell_agent: no command succeeded in {max_turns} tries; the last: {problem}", file=sys.stderr)
    return 1


def ask(messages, max_tokens):
    """One answer of the model."""
    url = urlsplit(os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    body = {"model": os.environ.get("OPENAI_MODEL", "default"), "messages": messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}", "Content-Type": "application/json"}
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(url.netloc, timeout=600)
        connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        fail(f"no answer from {url.netloc}: {error}")
    keys = ("choices", 0, "message", "content") if response.status == 200 else ("error", "message")
    try:
        answer = json.loads(content)
        for key in keys:
            answer = answer[key]
    except (ValueError, LookupError, TypeError):
        fail(f"{url.netloc} answered {response.status}: {content[:300].decode('utf-8', 'replace')}")
    if response.status != 200:
        fail(f"{url.netloc} answered {response.status}: {answer}")
    return answer or ""


def read_command(reply):
    """The first fenced block; small models often stop before they close it."""
    found = re.search(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)(?:\n?```|\Z)", reply, re.DOTALL)
    return (found[1].strip() or None) if found else None


def run(command):
    """Exit code and the end of the output. Nothing more of it is held: a model may well answer `cat /dev/zero`."""
    deadline = time.monotonic() + TIME_LIMIT_S
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that at the deadline its children go with it
    )
    output = b""
    with process.stdout as pipe:
        while (left_s := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0]:
            block = os.read(pipe.fileno(), KEPT_BYTES)
            if not block:
                break
            output = (output + block)[-KEPT_BYTES:]
    try:
        exit_code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124, f"it ran longer than {TIME_LIMIT_S:g} seconds"
    return exit_code, output.decode("utf-8", "replace").strip()[-OUTPUT_LIMIT:]


def fail(message):
    print(f"shell_agent: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
