"""Each known agent, as its registry ships it, through the proxy: it writes files, and no token drifts.

Only what is sampled is scripted. The agents are installed at their verified versions on first use.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from sessions import run_session
from three_turns import GRADER, build_replies, count_drifted
from transformers import AutoTokenizer

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.base import AgentHarness
from polar_trl.harness.pi import PiHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.load import load_renderer
from polar_trl.tools.doctor import MAX_MODEL_LEN, answer_by_turn, run_scripted_session
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


def list_live() -> list[object]:
    apis = ("openai", "openai-responses", "anthropic", "google")
    agents: list[AgentHarness] = [build_agent(name) for name in AGENTS]
    agents += [PiHarness(api=api) for api in apis[1:]]  # type: ignore[arg-type]
    return [pytest.param(agent, id=f"{agent.name}-{getattr(agent, '_api', 'its own')}") for agent in agents]


@pytest.mark.parametrize("harness", list_live())
def test_turns_that_are_told_while_they_are_sampled_become_one_trajectory(harness: AgentHarness) -> None:
    harness.install()
    replies = build_replies(harness)
    words = " ".join(f"word{number}" for number in range(40))
    told = [
        replace(
            reply,
            text=reply.text and f"{reply.text} {words}",
            reasoning=reply.reasoning and f"{reply.reasoning} {words}",
        )
        for reply in replies
    ]
    engine = ScriptedEngine(answer_by_turn(told), max_model_len=MAX_MODEL_LEN, token_delay_s=0.002)
    finished = run_session(harness, engine, grader=GRADER, live=True)
    rollout = finished.rollout
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, "completed")
    assert [call.message.text for call in rollout.calls if call.purpose == "policy"] == [reply.text for reply in told]
    assert count_drifted(rollout) == 0 and rollout.counters == {}
    assert len(finished.reconstruction.trajectories) == 1
