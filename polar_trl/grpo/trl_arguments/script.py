"""Read the keys that `trl grpo` has beside its config: the data set's name and splits, and the reward functions."""

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from trl.scripts.grpo import GRPOScriptArguments

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.dataset import read_tasks
from polar_trl.setup.run_setup import RunArguments
from polar_trl.types import Task

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Of `datasets`, by the ending of a file."""
_SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder that `Dataset.save_to_disk` wrote."""


def load_script_sets(
    script: GRPOScriptArguments, run: RunArguments, args: PolarGRPOConfig
) -> tuple[list[Task], list[Task]]:
    """Load the tasks of `dataset_name`: its training split, and its test split where the run evaluates.

    Without a `dataset_name` there are none.

    Raises:
        ConfigError: there is no such data set or split, or the run names tasks as well.
    """
    if script.dataset_name is None:
        return [], []
    if run.tasks is not None:
        raise ConfigError(f"tasks is {run.tasks!r} and dataset_name is {script.dataset_name!r}: give one of them")
    data = _load(script.dataset_name, script.dataset_config)
    train = _read_split(data, "dataset_train_split", script)
    evaluates = args.eval_strategy != "no" and run.eval_tasks is None
    return train, _read_split(data, "dataset_test_split", script) if evaluates else []


def list_script_rewards(script: GRPOScriptArguments) -> list[str]:
    """List what `reward_model_name_or_path` and `reward_funcs` name, in TRL's order."""
    model = script.reward_model_name_or_path
    return [*([model] if model else []), *(script.reward_funcs or [])]


def _load(name: str, config: str | None) -> DatasetDict | Dataset:
    path = Path(name)
    try:
        if path.is_file() and path.suffix in _READERS:
            return load_dataset(_READERS[path.suffix], data_files=str(path))
        if any((path / file).is_file() for file in _SAVED):
            return load_from_disk(name)
        return load_dataset(name, name=config)
    except Exception as error:  # of any library: pyarrow, huggingface_hub, requests
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"dataset_name {name!r} cannot be loaded: give a folder or file of this machine, or a data set of the hub "
            f"that it can reach ({type(error).__name__}: {reason})"
        ) from error


def _read_split(data: Any, key: str, script: GRPOScriptArguments) -> list[Task]:
    name = getattr(script, key)
    if isinstance(data, Dataset):
        data = {"train": data}  # saved without splits
    if name not in data:
        raise ConfigError(f"{key} is {name!r}, and {script.dataset_name!r} has the splits {', '.join(data)}")
    return list(read_tasks(data[name], f"{script.dataset_name}, split {name}").values())
