"""Run graded sessions of the training tasks into a folder, and build the data set of the accepted ones.

The sessions are those of an evaluation (`eval.evaluate`); the data set is built once all of them have run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from polar_trl.collect.data_set import Report, Selection, build_data_set, refuse_foreign
from polar_trl.eval.evaluate import run_evaluation
from polar_trl.eval.setup import EvalSetup, parse_eval
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
    setup = parse_eval(config, overrides, folder)
    tasks = setup.run.tasks
    # several engines are processes of `polar-trl eval`, which takes eval_tasks where there are any
    return Collection(
        setup=replace(setup, tasks=tasks, command=(*setup.command, "--tasks", tasks, "--eval_tasks", tasks)),
        selection=replace(selection, num_samples=setup.evaluation.num_samples),
    )


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
