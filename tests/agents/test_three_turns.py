"""Each known agent, as its registry ships it, through the proxy: it writes files, and no token drifts.

Only what is sampled is scripted. The agents are installed at their verified versions on first use.
"""

from itertools import pairwise

import pytest

from polar_trl.doctor import run_scripted_session
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.base import AgentHarness
from polar_trl.types import Message, Rollout, Task

GRADER = 'test "$(cat one.txt two.txt three.txt)" = onetwothree'


@pytest.mark.parametrize("name", AGENTS)
def test_three_turns_become_one_trajectory(name: str) -> None:
    harness = build_agent(name)
    harness.install()
    assert harness.find_installed_version() == harness.verified_version

    task = Task(id="three", instruction="Write three files: one.txt, two.txt, three.txt.", grader=GRADER)
    finished = run_scripted_session(harness, build_replies(harness), task)

    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    policy_calls = [call for call in rollout.calls if call.purpose == "policy"]
    assert len(policy_calls) == len(build_replies(harness))
    assert count_drifted(rollout) == 0
    assert len(finished.reconstruction.trajectories) == 1
    assert sum(finished.reconstruction.trajectories[0].trainable) == sum(
        len(call.completion.token_ids) for call in policy_calls
    )


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
