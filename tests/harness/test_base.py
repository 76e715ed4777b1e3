"""An agent whose own prompt fills the context window is refused before it is launched, with both numbers."""

import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS, build_agent
from polar_trl.harness.base import require_launch
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer

SIZES = [
    (name, {} if text is None else {"system_prompt": text}, size)
    for name, agent in AGENTS.items()
    for text, size in ((None, agent.prompt_size.default), ("Go.", agent.prompt_size.smallest))
    if name != "pi"
]


@pytest.mark.parametrize(("name", "options", "size"), SIZES)
def test_a_window_that_an_agents_own_prompt_fills_is_refused(name: str, options: dict[str, str], size: int) -> None:
    agent = build_agent(name, options)
    require_launch(agent, max_model_len=size + 1, max_tokens=64)
    for window in (size, size // 2, 1):
        with pytest.raises(ConfigError) as caught:
            require_launch(agent, max_model_len=window, max_tokens=64)
        said = str(caught.value)
        assert said.startswith(f"{name}: its own prompt has about {size} tokens, and the context window is {window}: ")
        assert "set vllm_max_model_length higher" in said
        shorter = f"or give the agent a shorter prompt by agent_options (down to {agent.prompt_size.smallest})"
        assert (shorter in said) is (not options)


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_is_refused_in_a_window_of_half_a_thousand_tokens(name: str) -> None:
    with (
        Proxy(ScriptedEngine([], max_model_len=512), ByteRenderer(), params=GenerationParams(max_tokens=64)) as proxy,
        pytest.raises(ConfigError, match=rf"^{name}: .* 512.*vllm_max_model_length"),
    ):
        RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(),
            harness=build_agent(name),
            grader=None,
            config=RolloutConfig(),
        )


def test_an_agent_of_which_nothing_is_known_is_not_refused() -> None:
    require_launch(ShellHarness("true"), max_model_len=1, max_tokens=1)
