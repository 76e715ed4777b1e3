"""Choose which calls of a session are trained, and whether a session that was cut is: `train_turns`, `cut_sessions`.

What is left out is context for what is trained, and is counted: `polar/dropped/not_chosen`, `polar/dropped/cut`.
"""

from collections.abc import Callable, Collection, Mapping

from polar_trl.errors import ConfigError
from polar_trl.rollout.reasons import was_cut
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.types import Rollout, Task
from polar_trl.user_code import describe_error, load_object

TurnChoice = Callable[[RolloutResult], Collection[int]]
"""Gives the indices of the calls to train, of those that could be."""


def load_turn_choice(setting: str) -> TurnChoice | None:
    """Load what `train_turns` names: "all" (None), "last", or a function of a rollout. Raises `ConfigError`."""
    if setting == "all":
        return None
    if setting == "last":
        return _choose_last
    function = load_object("train_turns", setting)
    if not callable(function):
        raise ConfigError(
            f"train_turns: {setting} is a {type(function).__name__}, and must be a function of a rollout"
        )

    def choose(result: RolloutResult) -> Collection[int]:
        rollout = result.rollout
        try:
            chosen = set(function(rollout))
        except Exception as error:
            raise ConfigError(f"train_turns: {setting} raised {describe_error(error)}") from error
        if unknown := [index for index in chosen if type(index) is not int or not 0 <= index < len(rollout.calls)]:
            raise ConfigError(
                f"train_turns: {setting} chose {unknown[0]!r} of a session with {len(rollout.calls)} calls; it must "
                "return indices of rollout.calls"
            )
        return chosen

    return choose


def find_cut_rule(rollout: Rollout, tasks: Mapping[str, Task], default: str) -> str:
    """Say what becomes of a rollout by `cut_sessions`, its task's or the run's; "train" where no limit ended it."""
    return (tasks[rollout.task_id].cut_sessions or default) if was_cut(rollout) else "train"


def _choose_last(result: RolloutResult) -> Collection[int]:
    trainable = [index for trajectory in result.reconstruction.trajectories for index in trajectory.call_indices]
    return {max(trainable)} if trainable else ()
