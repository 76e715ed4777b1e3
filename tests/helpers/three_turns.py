"""Put a known agent through the scripted session of three turns."""

from itertools import pairwise

from polar_trl.harness.base import AgentHarness
from polar_trl.types import Message, Rollout

GRADER = 'test "$(cat one.txt two.txt three.txt)" = onetwothree'


def build_replies(harness: AgentHarness) -> list[Message]:
    """A shell command; two at once; the end."""
    write = [harness.build_shell_call(f"printf {word} > {word}.txt") for word in ("one", "two", "three")]
    text, last_calls = harness.build_last_message("All three files are written.")
    first = Message(role="assistant", reasoning="Three files.", text="The first one.", tool_calls=(write[0],))
    both = Message(role="assistant", reasoning="Now the others.", text="", tool_calls=(write[1], write[2]))
    last = Message(role="assistant", text=text, tool_calls=last_calls)
    return [first, both, last]


def count_drifted(rollout: Rollout) -> int:
    """Policy calls whose prompt does not begin with the previous one's prompt and sampled ids."""
    calls = [call for call in rollout.calls if call.purpose == "policy"]
    return sum(
        later.prompt_ids[: len(earlier.prompt_ids) + len(earlier.completion.token_ids)]
        != earlier.prompt_ids + earlier.completion.token_ids
        for earlier, later in pairwise(calls)
    )
