"""Grade a session by the `/verify` of one of NeMo Gym's resources servers, found by Gym's head server.

Protocol: nemo-gym 0.4. The head server's `/global_config_dict_yaml` has every server's host and port, and names each
agent's resources server. `/seed_session` gets a row of a data set and begins a session, kept in cookies; `/verify`
gets the row and the `response`, with what the policy said and its tools gave, and answers with both and a `reward`.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import yaml  # type: ignore[import-untyped]

from polar_trl.errors import ConfigError, GradeError
from polar_trl.grade.base import MAX_OUTPUT, Grade, Grader
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Call, GradeReport, Task

HEAD_TIMEOUT_S = 10.0
_ROW = "gym"
"""Key of a task's metadata under which its row is."""


class GymGrader(Grader):
    """Grades tasks that are rows of Gym.

    Args:
        head: Address of Gym's head server, such as "http://127.0.0.1:11000".

    Raises `ConfigError` where no head server answers there.
    """

    takes_calls = True

    def __init__(self, head: str) -> None:
        self._head = head.rstrip("/")
        try:
            answer = httpx.get(f"{self._head}/global_config_dict_yaml", timeout=HEAD_TIMEOUT_S).raise_for_status()
            config = yaml.safe_load(answer.json())
            self._servers = {name: entry for name, entry in config.items() if isinstance(entry, dict)}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, yaml.YAMLError, AttributeError) as error:
            raise ConfigError(
                f"grader: no head server of NeMo Gym answers at {self._head} ({error}); `gym env start` starts one, "
                "on port 11000 unless told otherwise"
            ) from error

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise `ConfigError` for the first task that has no resources server."""
        for task in tasks:
            if _ROW not in task.metadata:
                raise ConfigError(f"grader: task {task.id!r} is no row of NeMo Gym, which {self._head} could grade")
            self._find_server(task)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward of a session without calls. Raises as `grade_session`."""
        return self.grade_session(task, sandbox, (), timeout_s=timeout_s)

    def grade_session(self, task: Task, sandbox: Sandbox, calls: Sequence[Call], *, timeout_s: float) -> Grade:
        """Return the reward that the resources server gives. Raises `GradeError` where it gives none."""
        verified = self.verify(task, calls, timeout_s=timeout_s)
        said = {name: value for name, value in verified.items() if name not in task.metadata[_ROW]}
        del said["response"], said["reward"]
        output = json.dumps(said, ensure_ascii=False)[:MAX_OUTPUT] if said else ""
        return Grade(reward=verified["reward"], report=GradeReport(output_tail=output))

    def verify(self, task: Task, calls: Sequence[Call], *, timeout_s: float) -> dict[str, Any]:
        """Return the answer of `/verify`: the row, the `response`, the `reward` (a number), and fields of its own.

        Raises `GradeError`.
        """
        name, url = self._find_server(task)
        row = task.metadata[_ROW]
        try:
            with httpx.Client(base_url=url, timeout=timeout_s) as client:
                client.post("/seed_session", json=row).raise_for_status()
                answer = client.post("/verify", json={**row, "response": build_response(row, calls)})
                verified = answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise GradeError(f"the resources server {name} at {url} does not answer: {reason}") from error
        reward = verified.get("reward") if isinstance(verified, dict) else None
        if not isinstance(reward, int | float):
            raise GradeError(f"the resources server {name} gave the reward {reward!r}", output=str(verified))
        return {"response": None, **verified}

    def _find_server(self, task: Task) -> tuple[str, str]:
        """Find the name and address of a row's resources server: of the agent that it refers to, or the only one."""
        named = (task.metadata[_ROW].get("agent_ref") or {}).get("name")
        agents = list(self._servers.get(named, {}).get("responses_api_agents", {}).values())
        names = [agents[0]["resources_server"]["name"]] if agents and "resources_server" in agents[0] else []
        names = names or [name for name, entry in self._servers.items() if "resources_servers" in entry]
        if len(names) != 1:
            raise ConfigError(
                f"grader: no resources server can be found for task {task.id!r}: its agent_ref ({named!r}) names no "
                f"agent of {self._head}, which has {len(names)} of them ({', '.join(sorted(names))}); start Gym with "
                "that agent, or with one resources server"
            )
        server = next(iter(self._servers[names[0]]["resources_servers"].values()))
        return names[0], f"http://{server['host']}:{server['port']}"


def build_response(row: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
    """Build the response of a session, as Gym's own agents do: all that followed the row's messages, as items.

    An item may be a message, a reasoning, a function's call or its output. The last one of each answer has the
    `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` (nats) of its call, where they are known.
    """
    answers = [call for call in calls if call.purpose == "policy" and call.is_answered]
    num_prompt = sum(len(call.prompt_ids) for call in answers)
    num_sampled = sum(len(call.completion.token_ids) for call in answers)
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
    was_cut = bool(answers) and answers[-1].completion.finish_reason == "length"
    return {
        "id": f"resp_{calls[0].session_id if calls else 'none'}",
        "object": "response",
        "created_at": int(calls[0].started_s if calls else time.time()),
        "model": row["responses_create_params"].get("model") or "policy",
        "output": [item for call in answers for item in _list_items(call)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
        "usage": None if any(call.text_only for call in answers) else usage,
    }


def _list_items(call: Call) -> Iterator[dict[str, Any]]:
    """List what a call adds: the results of tools that it was asked with, and its answer."""
    messages = list(call.request.messages)
    first = next((i + 1 for i in reversed(range(len(messages))) if messages[i].role != "tool"), 0)
    for message in messages[first:]:
        yield {"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.text}
    answer, items = call.message, list[dict[str, Any]]()
    name = f"{call.session_id}-{call.index}"
    if answer.reasoning:
        summary = [{"type": "summary_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    if answer.text or not (items or answer.tool_calls):
        content = [{"type": "output_text", "text": answer.text, "annotations": []}]
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": content})
    for tool_call in answer.tool_calls:
        called = {"call_id": tool_call.id, "name": tool_call.name, "arguments": tool_call.arguments}
        items.append({"type": "function_call", **called})
    if not call.text_only:
        items[-1] |= {
            "prompt_token_ids": list(call.prompt_ids),
            "generation_token_ids": list(call.completion.token_ids),
            "generation_log_probs": list(call.completion.logprobs),
        }
    yield from items
