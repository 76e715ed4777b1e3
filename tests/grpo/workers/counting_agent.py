"""An agent for tests: a few calls in one conversation, and a way to misbehave that the instruction names.

A second argument is a path: while there is a file, the agent stops after its first call, and says so in `waiting`.
"""

import http.client
import json
import os
import signal
import sys
import time

NUM_CALLS = 3


def ask(messages: list) -> str:
    host = os.environ["OPENAI_BASE_URL"].split("/")[2]
    connection = http.client.HTTPConnection(host, timeout=300)
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", "/v1/chat/completions", body, headers)
    reply = json.loads(connection.getresponse().read())
    connection.close()
    return reply["choices"][0]["message"]["content"]


def main() -> None:
    instruction = sys.argv[1]
    behaviour = instruction.split()[-1]
    messages = [{"role": "user", "content": instruction}]
    if behaviour == "silent":
        sys.exit(3)
    for number in range(NUM_CALLS):
        text = ask(messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on, part {number}"}]
        if len(sys.argv) > 2 and os.path.exists(sys.argv[2]):
            with open("waiting", "w"):
                time.sleep(600)
        if behaviour == "dawdle":
            time.sleep(2)
        if behaviour == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "sleep":
            time.sleep(600)
        if behaviour == "fork" and number == 0:
            messages[1]["content"] = "I said something else."
    with open("answer.txt", "w") as file:
        file.write(messages[-2]["content"])


main()
