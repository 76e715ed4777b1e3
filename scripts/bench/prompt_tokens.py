#!/usr/bin/env python3
"""Count the tokens of each agent's first prompt, by default, at its smallest, and with demonstrations.

python scripts/bench/prompt_tokens.py                      by SmolLM2's tokenizer
python scripts/bench/prompt_tokens.py --model Qwen/Qwen3-4B codex pi

Each figure is that of a real session of two calls in the local sandbox, with a scripted model (`polar-trl doctor`).
The smallest prompt has the system prompt of the run file ladder_pi and the agent's shell tool; its six demonstrations
are those of the last column. "-": the agent resumes no session.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from transformers import AutoTokenizer

from polar_trl.configs import find_config, find_packaged
from polar_trl.harness import AGENTS, build_agent
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.tools.doctor import check_agent

WITHOUT_SESSION = "mini_swe_agent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", metavar="AGENT", nargs="*", choices=[[], *AGENTS], help=f"of {', '.join(AGENTS)}")
    parser.add_argument("--model", default="polar_trl:models/SmolLM2-135M-Instruct", help="with a tokenizer")
    args = parser.parse_args()
    model = find_packaged(args.model)
    renderer = load_renderer(AutoTokenizer.from_pretrained(model), model)
    run = yaml.safe_load(find_config("ladder_pi").read_text(encoding="utf-8"))
    print("| agent | default | smallest | with six demonstrations |\n|---|---|---|---|", flush=True)
    for name in args.agents or AGENTS:
        counts = [count_tokens(name, options, renderer) for options in list_options(name, run["agent_options"])]
        cells = [*(f"{count:,}" for count in counts), "-", "-"][:3]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


def list_options(name: str, shown: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List the options of the columns."""
    yield {}
    smallest = {"system_prompt": shown["system_prompt"]}
    if name == WITHOUT_SESSION:
        yield smallest
        return
    smallest["tools"] = [build_agent(name).build_shell_call("true").name]
    yield smallest
    yield {**smallest, "demonstrations": shown["demonstrations"]}


def count_tokens(name: str, options: Mapping[str, Any], renderer: Renderer) -> int:
    """Run a session and count its first prompt."""
    checkup = check_agent(build_agent(name, options), name, backend=LocalSandboxBackend(), model=renderer)
    assert checkup.works and checkup.prompt_tokens is not None, f"{name} with {options}: {checkup.why}"
    return checkup.prompt_tokens


if __name__ == "__main__":
    main()
