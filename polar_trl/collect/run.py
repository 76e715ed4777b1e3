"""Run graded sessions of the training tasks into a folder, and build the data set of the accepted ones.

The sessions are those of an evaluation (`eval.evaluate`); the data set is built once all of them have run. Or they
were recorded before: somebody's own by `polar-trl serve`, or graded ones of a training or an evaluation.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polar_trl.collect.data_set import Report, Selection, build_data_set, refuse_foreign
from polar_trl.errors import ConfigError
from polar_trl.eval.evaluate import run_evaluation
from polar_trl.eval.sample_tasks import RESULTS_FILE, SampleResult, read_results, read_settings
from polar_trl.eval.serve import COMMAND
from polar_trl.eval.setup import EvalSetup, name_solutions, parse_eval
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.recording.log import read_record
from polar_trl.run_folder import FolderLock, disk_errors

DATA_SET_FOLDER = "dataset"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """The settings of a collection."""

    setup: EvalSetup
    selection: Selection

    @property
    def data_set(self) -> Path:
        """The data set's folder."""
        return self.setup.folder / DATA_SET_FOLDER


def parse_collection(config: Path | None, overrides: Sequence[str], folder: Path, selection: Selection) -> Collection:
    """Parse the settings from a run file, if there is one, and flags, which win. Raises `ConfigError`.

    The tasks are those to train on, whether or not the run file has others to evaluate on.
    """
    setup = parse_eval(config, overrides, folder, of_training=True)
    # several engines are processes of `polar-trl eval`, which takes eval_tasks where there are any
    columns = ("--eval_columns", json.dumps(setup.columns))
    command = (*setup.command, "--tasks", setup.tasks, "--eval_tasks", setup.tasks, *columns)
    return Collection(
        setup=replace(setup, command=command),
        selection=replace(selection, num_samples=setup.evaluation.num_samples),
    )


def collect_recorded(recorded: Path, folder: Path, selection: Selection, names: Sequence[str]) -> Report:
    """Write the data set of sessions that were recorded before.

    Those of `polar-trl serve` are accepted by whoever names them, as a reward of 1. Those of a training or evaluation
    keep their rewards, and the evaluations of a training run, which are held out, are left out.

    Args:
        recorded: The folder of the records.
        folder: Gets the data set.
        names: Of sessions, as in the keys, or ids of tasks; none: all that have an end.

    Raises:
        ConfigError: a folder without such sessions, or a name that none has.
        PolarError: no accepted session is left.
    """
    target = folder / DATA_SET_FOLDER
    refuse_foreign(target)
    settings = read_settings(recorded)
    is_served = settings.get("command") == COMMAND
    results, num_open = _list_recorded(recorded, is_served=is_served)
    known = sorted({result.task for result in results})
    unknown = sorted(set(names) - set(known))
    if unknown or not known:
        wanted = f"session {unknown[0]!r}" if unknown else "session"
        ends = f"; {num_open} without an end: end `polar-trl serve` first if it runs" if num_open else ""
        raise ConfigError(
            f"{recorded} has no finished {wanted} with an answer; it has {', '.join(known) or 'none'}{ends}"
        )
    with FolderLock(folder), disk_errors(folder):
        return build_data_set(
            recorded,
            target,
            selection,
            agent=settings.get("agent") or "own agent",
            model=_name_recorded(settings),
            results=[result for result in results if not names or result.task in names],
            is_graded=not is_served,
        )


def _name_recorded(settings: Mapping[str, Any]) -> str:
    """Name what answered, from the settings of the sessions' folder."""
    tokenizer = str(settings.get("tokenizer") or settings.get("model") or "unknown")
    if settings.get("engine") == "solutions":
        return name_solutions(tokenizer)
    return Path(str(settings.get("served_name") or tokenizer)).name


def _list_recorded(folder: Path, *, is_served: bool) -> tuple[list[SampleResult], int]:
    """List the sessions that have an end, served ones with an answer; and count those without an end.

    `sample` counts those of one name.
    """
    if not is_served and (folder / RESULTS_FILE).exists():
        return read_results(folder), 0
    paths = sorted((folder / "sessions").rglob("*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder} holds no sessions; give the folder that polar-trl serve recorded into")
    counts: Counter[str] = Counter()
    results, num_open = [], 0
    for path in paths:
        if not is_served and path.parent.name.startswith("eval_"):
            continue
        record = read_record(path)
        rollout = record.rollout
        num_open += not record.finished
        if not record.finished or (is_served and not any(call.is_answered for call in rollout.calls)):
            continue
        results.append(
            SampleResult(
                task=rollout.task_id,
                sample=counts[rollout.task_id],
                attempt=1,
                rollout=rollout.id,
                record=path.relative_to(folder).as_posix(),
                repo=None,
                reward=PASSING_REWARD if is_served else rollout.reward,
                error=rollout.error,
                stop_reason=rollout.stop_reason,
                calls=len(rollout.calls),
                sampled_tokens=sum(len(call.completion.token_ids) for call in rollout.calls),
                seconds=rollout.seconds,
            )
        )
        counts[rollout.task_id] += 1
    return results, num_open


def run_collection(collection: Collection, *, show_progress: bool = True) -> Report:
    """Run what is left to run, then write the data set.

    Raises:
        ConfigError: settings or a server that cannot work, or a folder that holds something else.
        PolarError: the infrastructure fails all the time, or nothing was accepted.
        KeyboardInterrupt: what has ended is kept.
    """
    setup = collection.setup
    refuse_foreign(collection.data_set)
    model = run_evaluation(setup, show_progress=show_progress)["model"]
    if Path(model).is_absolute() or Path(model).is_dir():  # a path of a machine does not belong in a data set
        model = Path(model).name
    disable = None if show_progress else True  # on a terminal alone, where the line is wiped away at the end
    with (
        tqdm(desc="accepted sessions", unit="session", disable=disable, leave=False) as bar,
        FolderLock(setup.folder),
        disk_errors(setup.folder),
    ):

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return build_data_set(
            setup.folder,
            collection.data_set,
            collection.selection,
            agent=setup.run.agent,
            model=model,
            on_progress=show,
        )
