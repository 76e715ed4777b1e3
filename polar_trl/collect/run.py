"""Run graded sessions of the training tasks into a folder, and build the data set of the accepted ones.

The sessions are those of an evaluation (`eval.evaluate`); the data set is built once all of them have run. Or they
are somebody's own, recorded by `polar-trl serve`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from polar_trl.collect.data_set import Report, Selection, build_data_set, refuse_foreign
from polar_trl.errors import ConfigError
from polar_trl.eval.evaluate import run_evaluation
from polar_trl.eval.sample_tasks import SampleResult, read_settings
from polar_trl.eval.setup import EvalSetup, parse_eval
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.recording.log import read_record
from polar_trl.run_folder import FolderLock, disk_errors
from polar_trl.setup.run_setup import require_tasks

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
    setup = parse_eval(config, overrides, folder)
    tasks = require_tasks(setup.run)
    # several engines are processes of `polar-trl eval`, which takes eval_tasks where there are any
    return Collection(
        setup=replace(setup, tasks=tasks, command=(*setup.command, "--tasks", tasks, "--eval_tasks", tasks)),
        selection=replace(selection, num_samples=setup.evaluation.num_samples),
    )


def collect_recorded(recorded: Path, folder: Path, selection: Selection, names: Sequence[str]) -> Report:
    """Write the data set of sessions that `polar-trl serve` recorded: who names them accepts them, as a reward of 1.

    Args:
        recorded: The folder that serve wrote.
        folder: Gets the data set.
        names: Of sessions, as in the keys; none: all that have an end.

    Raises:
        ConfigError: a folder without such sessions, or a name that none has.
        PolarError: no session with an answer is left.
    """
    target = folder / DATA_SET_FOLDER
    refuse_foreign(target)
    results = _list_recorded(recorded)
    if unknown := sorted(set(names) - {result.task for result in results}):
        known = ", ".join(sorted({result.task for result in results})) or "none"
        raise ConfigError(f"{recorded} has no finished session {unknown[0]!r} with an answer; it has {known}")
    settings = read_settings(recorded)
    with FolderLock(folder), disk_errors(folder):
        return build_data_set(
            recorded,
            target,
            selection,
            agent=settings.get("agent") or "own agent",
            model=Path(str(settings.get("tokenizer", "unknown"))).name,
            results=[result for result in results if not names or result.task in names],
        )


def _list_recorded(folder: Path) -> list[SampleResult]:
    """List the sessions that have an end and an answer; `sample` counts those of one name."""
    paths = sorted((folder / "sessions").rglob("*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder} holds no sessions; give the folder that polar-trl serve recorded into")
    counts: Counter[str] = Counter()
    results = []
    for path in paths:
        record = read_record(path)
        rollout = record.rollout
        if not record.finished or not any(call.is_answered for call in rollout.calls):
            continue
        results.append(
            SampleResult(
                task=rollout.task_id,
                sample=counts[rollout.task_id],
                attempt=1,
                rollout=rollout.id,
                record=path.relative_to(folder).as_posix(),
                repo=None,
                reward=PASSING_REWARD,
                error=None,
                stop_reason=rollout.stop_reason,
                calls=len(rollout.calls),
                sampled_tokens=sum(len(call.completion.token_ids) for call in rollout.calls),
                seconds=rollout.seconds,
            )
        )
        counts[rollout.task_id] += 1
    return results


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
