"""The smallest agent: asks the model once. Standard library only.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=key python3 ask.py "What is six times seven?"
"""

import json
import os
import sys
from urllib.request import Request, urlopen

body = {"model": os.environ.get("OPENAI_MODEL", "policy"), "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
