#!/usr/bin/env python3
"""A coding agent of one file: it asks for one bash block per turn, runs it, and shows what it printed.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=key OPENAI_MODEL=name python3 agent.py "Repair add()"

It knows nothing of training. Exit codes: 0 done, 1 out of turns or no answer from the model.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

MAX_TURNS = 50
MAX_OUTPUT_CHARACTERS = 8000
SYSTEM = """You repair a Python repository in the current folder. Answer each time with one bash code block; you are
shown what it prints. Look at the code, change it, and run the tests with `python3 -m pytest -q`. When the work is
done, answer without a code block."""


def main(instruction):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for _ in range(MAX_TURNS):
        reply = ask(messages)
        block = re.search(r"```(?:bash|sh)\n(.*?)```", reply, re.DOTALL)
        if block is None:
            return 0
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": run(block[1])})
    return 1


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=1800) as response:
            return json.load(response)["choices"][0]["message"]["content"] or ""
    except urllib.error.HTTPError as error:
        sys.exit(f"agent: {error.code}: {error.read().decode(errors='replace')[:500]}")
    except OSError as error:
        sys.exit(f"agent: no answer: {error}")


def run(command):
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    except subprocess.TimeoutExpired:
        return "Stopped after 60 seconds."
    output = done.stdout.decode(errors="replace")[-MAX_OUTPUT_CHARACTERS:]
    return f"Exit code {done.returncode}.\n{output}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
