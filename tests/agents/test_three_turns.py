"""Each known agent, as its registry ships it, through the proxy: it writes files, and no token drifts.

Only what is sampled is scripted. The agents are installed at their verified versions on first use.
"""

from pathlib import Path

import pytest
from three_turns import GRADER, build_replies, count_drifted
from transformers import AutoTokenizer

from polar_trl.harness import AGENTS, build_agent
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.tools.doctor import run_scripted_session
from polar_trl.types import Task


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> Renderer:
    return load_renderer(AutoTokenizer.from_pretrained(smollm2), str(smollm2))


@pytest.mark.parametrize("name", AGENTS)
def test_three_turns_become_one_trajectory(name: str, renderer: Renderer) -> None:
    harness = build_agent(name)
    harness.install()
    assert harness.find_installed_version() == harness.verified_version

    task = Task(id="three", instruction="Write three files: one.txt, two.txt, three.txt.", grader=GRADER)
    finished = run_scripted_session(harness, build_replies(harness), task, backend=LocalSandboxBackend())

    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    policy_calls = [call for call in rollout.calls if call.purpose == "policy"]
    assert len(policy_calls) == len(build_replies(harness))
    assert count_drifted(rollout) == 0
    assert len(finished.reconstruction.trajectories) == 1
    assert sum(finished.reconstruction.trajectories[0].trainable) == sum(
        len(call.completion.token_ids) for call in policy_calls
    )
    # the size by which a window is refused: a little less than with any vocabulary, this one being small
    first = policy_calls[0].request
    assert (
        harness.prompt_size.default
        < len(renderer.render(first.messages, first.tools))
        < 1.4 * harness.prompt_size.default
    )
