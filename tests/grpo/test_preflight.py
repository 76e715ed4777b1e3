"""Model, tasks and rewards are checked before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polar_trl.errors import ConfigError
from polar_trl.grade.by_task import GraderByTask
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.preflight import build_default_grader, read_model_config, require_bases
from polar_trl.harness import build_agent
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task

PLAIN = Task(id="plain", instruction="x")
GRADED = Task(id="graded", instruction="x", grader="true")


def test_a_model_with_code_of_its_own_is_read_where_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "odd_config.py").write_text(
        "from transformers import PretrainedConfig\n\n\nclass OddConfig(PretrainedConfig):\n    model_type = 'odd'\n"
    )
    written = {"model_type": "odd", "auto_map": {"AutoConfig": "odd_config.OddConfig"}, "hidden_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_model_config(str(tmp_path), trust_remote_code=True).hidden_size == 24
    with pytest.raises(
        ConfigError, match="brings code of its own: read it, and if you trust it set trust_remote_code: true"
    ):
        read_model_config(str(tmp_path))


def test_no_model_is_one_sentence(tmp_path: Path) -> None:
    from polar_trl.grpo.trainer import PolarGRPOTrainer

    args = PolarGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(
        ConfigError, match="model_name_or_path is needed: a model folder, a run's checkpoint-N, or a h"
    ):
        PolarGRPOTrainer(model=None, args=args, harness=ShellHarness("true"))  # type: ignore[arg-type]


def test_a_window_that_the_agents_prompt_fills_is_refused_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polar_trl.grpo.trainer import PolarGRPOTrainer

    monkeypatch.setenv("POLAR_TRL_CACHE", str(tmp_path / "nothing is installed"))
    args = PolarGRPOConfig(output_dir=str(tmp_path / "run"), use_cpu=True, bf16=False, vllm_max_model_length=4096)
    with pytest.raises(ConfigError, match=r"codex: its own prompt has about 8400 tokens, and the context win.* 4096"):
        PolarGRPOTrainer(model=str(tiny_model), args=args, harness=build_agent("codex"), train_dataset=[GRADED])
    assert not (tmp_path / "run").exists()


def test_parts_of_ones_own_derive_from_the_base_of_their_kind() -> None:
    class Stamp:
        def grade(self, task: Task, sandbox: object, *, timeout_s: float) -> None: ...

    require_bases(LocalSandboxBackend(), None)
    with pytest.raises(ConfigError, match=r"Stamp must derive from polar_trl\.grade\.base\.Grader"):
        require_bases(LocalSandboxBackend(), Stamp())
    with pytest.raises(ConfigError, match=r"Stamp must derive from polar_trl\.sandbox\.base\.SandboxBackend"):
        require_bases(Stamp(), None)


def test_a_function_or_a_class_in_the_place_of_a_grader() -> None:
    def score(task: Task, sandbox: object) -> float: ...

    with pytest.raises(ConfigError, match=r"a function: give grader=polar_trl\.FunctionGrader\(score\), .*\[score\]"):
        require_bases(LocalSandboxBackend(), score)
    with pytest.raises(ConfigError, match=r"FunctionGrader\(my_function\)"):
        require_bases(LocalSandboxBackend(), lambda task, sandbox: 1.0)
    with pytest.raises(ConfigError, match=r"GraderByTask is a class: give what it makes, GraderByTask\(\.\.\.\)"):
        require_bases(LocalSandboxBackend(), GraderByTask)
    with pytest.raises(ConfigError, match=r"LocalSandboxBackend is a class"):
        require_bases(LocalSandboxBackend, None)


def test_tasks_have_a_way_to_be_graded_all_or_none() -> None:
    backend = LocalSandboxBackend()
    assert build_default_grader(backend, [PLAIN]) is None
    assert isinstance(build_default_grader(backend, [GRADED]), GraderByTask)
    with pytest.raises(ConfigError, match="task 'plain' has no 'grader' command and no tests, and others have"):
        build_default_grader(backend, [GRADED, PLAIN, replace(GRADED, id="third")])
