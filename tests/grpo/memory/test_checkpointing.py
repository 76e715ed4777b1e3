"""Layers are checkpointed as memory needs, and no number of a step changes by it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import train_cost
from torch import Tensor

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.memory.checkpointing import Checkpointing, build_setup, count_apart
from polar_trl.grpo.memory.memory import PassMemory, count_pass
from polar_trl.grpo.packing import prefix
from polar_trl.grpo.packing.layout import build_layout
from polar_trl.grpo.packing.packer import Packer
from polar_trl.grpo.packing.prefix import keep_prefix
from polar_trl.grpo.packing.supported import find_causal_model
from polar_trl.grpo.rows import Row

COUNTED = PassMemory(num_layers=4, every_peak=300, none_peak=1000, every_saved=100, none_saved=900)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    """A trainer of a tiny Qwen3 with LoRA, and rows of one pass; memory is counted for real."""
    case = train_cost.Case.parse("qwen3-4b:lora:16384:auto")
    built = train_cost.build_trainer(case, str(tmp_path), tiny=True)
    train_cost._COUNTED.clear()
    yield built


def run_step(trainer: Any) -> tuple[float, list[Tensor], list[int]]:
    """Loss and gradients of a step, and how often each layer was computed."""
    layers = trainer.step.checkpointing._layers
    calls = [0] * len(layers)
    hooks = []
    for index, layer in enumerate(layers):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        hooks.append(layer.register_forward_pre_hook(count))
    trainer._step, trainer.current_gradient_accumulation_steps, trainer.step.windows = 0, 1, None
    loss = trainer.training_step(trainer.model, [{}])
    for hook in hooks:
        hook.remove()
    gradients = [weight.grad.clone() for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.model.zero_grad()
    return float(loss), gradients, calls


def set_room(trainer: Any, checkpointed: int) -> None:
    """Let a pass have room for all layers but so many."""
    found = trainer.step.checkpointing
    tokens = sum(len(row.token_ids_T) for row in trainer.preset)
    found._read_room = lambda: found.count(tokens).peak(checkpointed)


def test_as_many_layers_as_needed_are_computed_again_the_first_ones(trainer: Any) -> None:
    results = []
    for needed in (0, 1, 3, 4):
        set_room(trainer, needed)
        results.append(run_step(trainer))
        assert results[-1][2] == [2] * needed + [1] * (4 - needed)
        assert trainer._metrics["train"]["polar/checkpointed_layers"][-1] == needed
    for loss, gradients, _ in results[1:]:
        assert loss == results[0][0]
        for ours, others in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-7)


def test_a_number_of_layers_and_no_checkpointing_are_kept_to(trainer: Any) -> None:
    found = trainer.step.checkpointing
    trainer.args.checkpointed_layers = 2
    assert run_step(trainer)[2] == [2, 2, 1, 1]
    trainer.args.checkpointed_layers = 99
    assert run_step(trainer)[2] == [2] * 4
    trainer.args.checkpointed_layers = None
    trainer.args.gradient_checkpointing = False
    assert found.choose([object(), object()]) == [0, 0]


def test_what_cannot_be_counted_is_checkpointed_as_trl_does(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_num_tokens: int) -> PassMemory:
        raise RuntimeError("a shape that depends on data")

    trainer.step.checkpointing.count = fail
    assert run_step(trainer)[2] == [2] * 4
    assert "every layer is checkpointed: its memory could not be counted" in caplog.text


def test_a_pass_that_runs_out_of_memory_is_trained_again_with_more_layers(trainer: Any) -> None:
    set_room(trainer, 4)
    loss, gradients, _ = run_step(trainer)
    entropy = trainer._metrics["train"]["entropy"][-1]
    set_room(trainer, 0)
    third = trainer.step.checkpointing._layers[2]

    def run_out(*_: Any) -> None:
        if not third.gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    # in the backward pass: by then the last layer has added to its gradients
    third.register_full_backward_pre_hook(run_out)
    again, same, calls = run_step(trainer)
    assert trainer._metrics["train"]["polar/checkpointed_layers"][-1] == 3
    assert calls[3] == 1 + 1 + 1 + 1  # once per attempt
    assert again == loss and trainer._metrics["train"]["entropy"][-1] == pytest.approx(entropy)
    for ours, others in zip(same, gradients, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-7)
    run_step(trainer)  # and from then on
    assert trainer._metrics["train"]["polar/checkpointed_layers"][-1] == 3


def share_prompt(trainer: Any, monkeypatch: pytest.MonkeyPatch, num_shared: int) -> None:
    """Let five rows of a pass each, of which all but the third begin with the same tokens, be packed as a tree."""
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 8)
    trainer.args.max_tokens_per_device = num_shared + 40
    policy = find_causal_model(trainer.model)
    count_spare = trainer.step.checkpointing.count_spare_tokens
    trainer.step.packer = Packer(trainer.args, trainer.accelerator, policy, "tree", count_spare=count_spare)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(500, size=num_shared)] * 5
    prompts[2] = rng.integers(500, size=num_shared)
    trainer.preset = []
    for number, prompt in enumerate(prompts):
        ids = np.concatenate([prompt, rng.integers(500, size=40 - 2 * number)])
        trainable = np.arange(len(ids)) > num_shared + 5
        trainer.preset.append(
            Row(
                rollout_id=f"r{number}",
                advantage=1.0 - number,
                token_ids_T=ids,
                trainable_T=trainable,
                logprobs_T=np.where(trainable, -5.0, 0.0).astype(np.float32),
                policy_versions_T=np.where(trainable, 0, -1),
            )
        )


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_that_ran_out_of_memory_fills_its_prefix_again(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, beta: float
) -> None:
    trainer.args.beta = beta
    found = trainer.step.checkpointing
    found._read_room = lambda: None
    share_prompt(trainer, monkeypatch, 60)
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 1000)
    loss, gradients, _ = run_step(trainer)
    assert not any(batch["packed"].layout.prefix for batch in trainer.step.windows[0])
    monkeypatch.setattr(prefix, "LEAST_TOKENS", 8)
    once, same, _ = run_step(trainer)
    assert [batch["packed"].layout.num_before for batch in trainer.step.windows[0]] == [60, 60, 0, 60, 0]
    assert once == pytest.approx(loss, rel=1e-5)
    found._read_room = lambda: 1e12
    third, tries = found._layers[2], []

    def run_out(*_: Any) -> None:
        tries.append(len(tries))
        if tries == [0, 1, 2]:  # in a pass without the prefix, after two have added gradients to what is kept of it
            raise torch.OutOfMemoryError("CUDA out of memory")

    third.register_full_backward_pre_hook(run_out)
    again, others, _ = run_step(trainer)
    assert again == pytest.approx(loss, rel=1e-5) and len(tries) == 3 + 5
    for ours, theirs, wanted in zip(same, others, gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(theirs, wanted, rtol=1e-5, atol=1e-7)


def test_a_prefix_is_kept_as_far_as_there_is_memory_beside_the_largest_pass(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trainer.step.checkpointing
    assert found._read_free_memory() is None  # a CPU
    found._read_room = lambda: None
    assert found.count_spare_tokens() is None
    share_prompt(trainer, monkeypatch, 60)
    found._read_room = lambda: 1e12
    run_step(trainer)
    layouts = [batch["packed"].layout for batch in trainer.step.windows[0]]
    with keep_prefix(layouts[0], find_causal_model(trainer.model), trainer.accelerator):
        kept = sum(leaf.nbytes + leaf.grad.nbytes for leaf in layouts[0].prefix.kept.values())
    assert kept == found._count_kept(60)
    room = found._room
    assert room == 1e12 - kept  # what is left for the passes
    largest = found.count(trainer.args.max_tokens_per_device).peak(4)
    found._read_room = lambda: largest + kept // 2
    assert found.count_spare_tokens() == 30
    run_step(trainer)
    assert [batch["packed"].layout.num_before for batch in trainer.step.windows[0]] == [30, 30, 0, 30, 0]
    found._read_room = lambda: largest - 1
    assert found.count_spare_tokens() == 0
    run_step(trainer)
    assert not any(batch["packed"].layout.prefix for batch in trainer.step.windows[0])


@pytest.mark.parametrize(
    ("changes", "num_processes", "words"),
    [
        ({}, 1, "with 4 of 4 layers checkpointed, which is all: lower max_tokens_per_device"),
        ({"checkpointed_layers": 1}, 1, "leave checkpointed_layers out"),
        ({"gradient_checkpointing": False}, 1, "set gradient_checkpointing: true"),
        ({}, 2, "other processes wait in it: resume with checkpointed_layers: 1"),
    ],
)
def test_running_out_of_memory_for_good_says_what_to_do(
    trainer: Any, changes: dict[str, Any], num_processes: int, words: str
) -> None:
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    found = trainer.step.checkpointing
    found._accelerator = SimpleNamespace(num_processes=num_processes, device=torch.device("cpu"))
    micro_batch = {"packed": SimpleNamespace(layout=build_layout([np.zeros(65536)], share_prefixes=False))}
    with (
        pytest.raises(ConfigError, match=r"a pass of 65,536 tokens ran out of GPU memory") as raised,
        found.apply(micro_batch, 4 if num_processes == 1 else 0),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert words in str(raised.value)


def test_ranks_agree_on_the_longest_pass_and_the_least_room() -> None:
    other = torch.tensor([-700.0, 10.0, 30.0], dtype=torch.float64)  # the room's negative, and tokens
    accelerator = SimpleNamespace(
        num_processes=2, device=torch.device("cpu"), gather=lambda own: torch.cat([own, other])
    )
    args = SimpleNamespace(gradient_checkpointing=True, checkpointed_layers=None, max_tokens_per_device=40)
    model = SimpleNamespace(get_decoder=lambda: SimpleNamespace(layers=()))
    found = Checkpointing(args, accelerator, model, read_room=lambda: 900.0)
    asked = []

    def count(num_tokens: int) -> PassMemory:
        asked.append(num_tokens)
        return COUNTED

    found.count = count  # type: ignore[method-assign]
    found._layers = [object()] * 4  # type: ignore[list-item]
    passes = [{"packed": SimpleNamespace(layout=build_layout([np.zeros(n)], share_prefixes=False))} for n in (20, 25)]
    assert found.choose(passes) == [2, 2]  # 1000 - 2 * 200 is within 700; one layer is not enough
    assert asked[-2:] == [20, 30]


def test_a_process_without_a_gpu_counts_the_same(trainer: Any) -> None:
    setup = build_setup(trainer.args, trainer.accelerator, trainer.model)
    assert count_apart([setup]) == [count_pass(setup)]
    with pytest.raises(ConfigError, match="a pass could not be counted: Traceback"):
        count_apart([replace(setup, model_config="no configuration")])


def test_the_fewest_layers_that_fit() -> None:
    assert [COUNTED.peak(n) for n in range(5)] == [1000, 800, 600, 400, 300]
    assert [COUNTED.choose(room) for room in (1000, 999, 600, 300, 10)] == [0, 1, 2, 4, 4]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointed_layers must be 0 or more, or left out"):
        PackedGRPOConfig(output_dir="out", use_cpu=True, report_to="none", checkpointed_layers=-1)
