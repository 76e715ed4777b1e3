#!/usr/bin/env python3
"""An agent that makes sessions of a set length: so many calls, each answered in full, with so much seen in between.

Standard library only. Its first prompt has a system part that all sessions share. It does nothing with the answers:
where the model is random, they are noise, and what counts is their length.
"""

import http.client
import json
import os
import random
import sys
from urllib.parse import urlsplit

WORDS = ("the", "of", "to", "and", "in", "is", "for", "on", "that", "with", "file", "line", "test", "code", "value")


def words(count, seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def main():
    calls, prompt_words, seen_words, max_tokens = map(int, sys.argv[1:5])
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    messages = [
        {"role": "system", "content": words(prompt_words, "system")},
        {"role": "user", "content": sys.argv[5]},
    ]
    connection = http.client.HTTPConnection(url.netloc, timeout=3600)
    for number in range(calls):
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": max_tokens}
        connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            sys.exit(f"call {number}: {response.status} {answer}")
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""})
        messages.append({"role": "user", "content": words(seen_words, f"{sys.argv[5]}-{number}")})


main()
