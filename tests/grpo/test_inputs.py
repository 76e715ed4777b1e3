"""Arguments of the trainer in TRL's forms: what is read, and the one sentence for what is not."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

from polar_trl.errors import ConfigError, TaskError
from polar_trl.grade.command import CommandGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import (
    build_eval_dataset,
    build_prompt,
    list_columns,
    merge_sets,
    read_eval_sets,
    read_tasks,
)
from polar_trl.grpo.preflight import require_config
from polar_trl.grpo.reward_funcs import list_reward_functions, load_reward_functions, match_processing_classes
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.shell import ShellHarness
from polar_trl.types import Task

USER = [{"role": "user", "content": "fix it"}]
TASK = Task(id="a", instruction="x")


def brevity(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_the_arguments_are_trls_in_its_order() -> None:
    theirs = list(inspect.signature(GRPOTrainer.__init__).parameters.values())
    ours = list(inspect.signature(PolarGRPOTrainer.__init__).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] == ["harness", "sandbox", "grader"]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"harness= is needed, the agent to train in: harness=polar_trl\.build_agent\('pi'\)"),
        ({"harness": "pi"}, r"harness= is 'pi': give an agent, such as harness=polar_trl\.build_agent\('pi'\)"),
        (
            {"harness": ShellHarness("true"), "tools": [brevity]},
            "tools cannot be used: the agent brings its own",
        ),
        ({"harness": ShellHarness("true"), "args": GRPOConfig("x", use_cpu=True, bf16=False)}, "args is a GRPOConfig"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolarGRPOTrainer("no/model", **arguments)


def trainer(tiny_model: Path, tmp_path: Path, *given: Any, **settings: Any) -> PolarGRPOTrainer:
    args = PolarGRPOConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, **settings)
    return PolarGRPOTrainer(str(tiny_model), given[0], args, *given[1:], harness=ShellHarness("true"))


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ((brevity,), {}, r"train_dataset= is needed: a list of polar_trl\.Task, or a data set with a column 'prompt'"),
        ((brevity, Dataset.from_list([{"prompt": "x"}]).to_iterable_dataset()), {}, "train_dataset is an IterableDat"),
        (
            (brevity, DatasetDict(a=Dataset.from_list([{"prompt": "x"}]))),
            {},
            "train_dataset is a DatasetDict of a: give",
        ),
        (("no_such_function", [TASK]), {}, "reward_funcs has 'no_such_function': give 'module.function', a folder"),
        (
            (brevity, [TASK]),
            {"reward_weights": [1.0, 2.0]},
            "reward_weights has length 2, and 1 parts give rewards",
        ),
        ((None, [TASK]), {}, "nothing gives a reward"),
        ((brevity, [TASK]), {"gradient_accumulation_steps": 2}, "1 tasks are fewer than"),
    ],
)
def test_nothing_is_loaded_for_what_cannot_work(
    tiny_model: Path, tmp_path: Path, given: tuple[Any, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_model, tmp_path, *given, **settings)
    assert not (tmp_path / "run").exists()


def test_without_settings_the_folder_is_named_by_the_model() -> None:
    args = require_config("models/tiny-llama", None)
    assert (args.output_dir, args.max_completion_length, args.logging_steps) == ("tiny-llama-GRPO", 4096, 1)


# Data sets


def test_a_column_prompt_is_the_instruction_and_the_others_are_metadata() -> None:
    rows = [
        {"prompt": "first", "answer": "4", "level": 1, "files": {"a.py": "1\n", "b.py": None}},
        {"prompt": [{"role": "system", "content": "Be brief."}, *USER], "answer": None, "level": 2},
    ]
    first, second = read_tasks(rows).values()
    assert (first.instruction, dict(first.files)) == ("first", {"a.py": "1\n"})
    assert dict(first.metadata) == {"answer": "4", "level": 1, "files": {"a.py": "1\n"}}
    assert (second.instruction, build_prompt(second)) == ("Be brief.\n\nfix it", rows[1]["prompt"])
    assert list_columns(read_tasks(rows)) == ["answer", "level", "files"]
    assert build_prompt(first) == "first" and build_prompt(TASK) == [{"role": "user", "content": "x"}]


def test_ids_follow_from_the_content_and_a_row_may_be_there_twice() -> None:
    rows = Dataset.from_list([{"prompt": USER, "n": 1}, {"prompt": USER, "n": 2}, {"prompt": USER, "n": 1}])
    ids = list(read_tasks(rows))
    assert len(set(ids)) == 3 and ids[2] == f"{ids[0]}-2"
    assert list(read_tasks(rows.select([1, 0]))) == [ids[1], ids[0]]
    assert list(read_tasks([{"id": 7, "prompt": "x"}])) == ["7"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [*USER, {"role": "assistant", "content": "no"}, *USER]},
            r"train_dataset, row 0: its prompt has the turns user, assistant, user, and an agent starts from one",
        ),
        ({"prompt": []}, "its prompt has the turns of nobody"),
        ({"prompt": 3}, "'prompt' must be text or a list of messages, not 3"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "a message of its prompt is not text"),
        ({"prompt": "x", "images": [b"png"]}, "it has pictures, which agents are not given"),
        ({"prompt": "x", "rollouts": 1}, "reward functions get something else under the name 'rollouts'; rename"),
        ({"prompt": "x", "tests": "assert f()"}, r"'tests' must be an object, .* else rename it"),
        ({"prompt": ""}, "'instruction' is missing or empty"),
        ({"text": "x"}, "unknown field 'text'"),
        (["x"], "a task is a Task or a mapping, not list"),
    ],
)
def test_rows_that_no_agent_can_start_from(row: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read_tasks([row])


def test_evaluation_sets_by_name() -> None:
    easy, hard = Dataset.from_list([{"prompt": "x"}]), [Task(id="h", instruction="y")]
    sets = read_eval_sets({"easy": easy, "hard": hard})
    built = build_eval_dataset(sets)
    assert isinstance(built, dict) and [len(part) for part in built.values()] == [1, 1]
    assert len(merge_sets(sets)) == 2
    assert isinstance(build_eval_dataset(read_eval_sets(hard)), Dataset)
    assert list(read_eval_sets(DatasetDict(test=easy))) == ["test"]
    assert read_eval_sets(None) == {} and build_eval_dataset({}) is None
    with pytest.raises(TaskError, match=r"eval_dataset\['b'\] has another task 'h' than one before it"):
        merge_sets(read_eval_sets({"a": hard, "b": [Task(id="h", instruction="z")]}))
    with pytest.raises(ConfigError, match=r"eval_dataset\['a'\] is an IterableDataset"):
        read_eval_sets({"a": easy.to_iterable_dataset()})


# Reward functions


def save_model(folder: Path, kind: type = LlamaForSequenceClassification, **settings: Any) -> str:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    kind(LlamaConfig(vocab_size=16, **sizes, **settings)).save_pretrained(folder)
    return str(folder)


def test_reward_functions_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_of_a_user.py").write_text("def short(**_):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    model = save_model(tmp_path / "judge", num_labels=1)
    loaded = load_reward_functions([brevity, "own_rewards_of_a_user.short", "own_rewards_of_a_user:short", model])
    assert loaded[0] is brevity and loaded[1] is loaded[2] and loaded[1](x=1) == [] and loaded[3] == model
    assert load_reward_functions("think_format_reward") == [think_format_reward]
    assert len(load_reward_functions("get_soft_overlong_punishment")) == 1
    judge = LlamaForSequenceClassification.from_pretrained(model)
    assert load_reward_functions(judge) == [judge]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda _: "acuracy_reward", "did you mean 'accuracy_reward'"),
        (lambda _: "accuracy_reward", "'accuracy_reward' needs the package math-verify: pip install math-verify"),
        (lambda _: "no_such_module.f", "there is no module 'no_such_module'"),
        (lambda _: "json:dump_it", r"has no 'dump_it'; did you mean 'dumps?'"),
        (lambda _: 3, "reward_funcs has 3: give a function, the name of one, or a reward model"),
        (lambda _: "nobody/nothing", "reward_funcs: no model at 'nobody/nothing'"),
        (lambda folder: save_causal(folder), "is a LlamaForCausalLM; a reward model is a sequence classification"),
        (
            lambda folder: LlamaForSequenceClassification.from_pretrained(save_model(folder, num_labels=2)),
            "num_labels=1",
        ),
    ],
)
def test_reward_functions_that_are_none(tmp_path: Path, build: Callable[[Path], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_functions(build(tmp_path / "model"))


def load_judge(folder: str) -> LlamaForSequenceClassification:
    return LlamaForSequenceClassification.from_pretrained(folder)


def save_causal(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return str(folder)


def test_weights_and_tokenizers_are_one_for_each() -> None:
    grader = CommandGrader("true")
    functions = list_reward_functions(grader, [brevity], [1.0, 0.5])
    with pytest.raises(ConfigError, match="has length 1, and 2 parts give rewards: grader, brevity; give one weight"):
        list_reward_functions(grader, [brevity], [1.0])
    assert match_processing_classes(None, functions, grader) is None
    assert match_processing_classes("tokenizer", functions, grader) == [None, "tokenizer"]
    with pytest.raises(ConfigError, match="reward_processing_classes has length 2, and reward_funcs 1: give one for"):
        match_processing_classes([None, None], functions, grader)
