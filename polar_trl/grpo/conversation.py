"""Build a rollout's last conversation in TRL's conversational form, for its tables and reward functions."""

from typing import Any

from polar_trl.types import Message, Rollout


def conversation_after_instruction(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the last call's conversation after its first user message, in TRL's conversational form."""
    calls = [call for call in rollout.calls if call.purpose == "policy"]
    if not calls:
        return [{"role": "assistant", "content": ""}]
    messages = [*calls[-1].request.messages, calls[-1].message]
    first_user = next((i for i, m in enumerate(messages) if m.role == "user"), -1)
    return [_message_to_dict(m) for m in messages[first_user + 1 :]]


def _message_to_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain
