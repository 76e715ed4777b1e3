"""Build the agent, sandboxes and grader of a run from its settings, for training, evaluation and collecting.

Settings that nothing would read, and tasks whose graders do not tell their solution from no change, are refused
(`ConfigError`).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError
from polar_trl.grade.base import Grader
from polar_trl.grade.by_task import GraderByTask, check_gradable
from polar_trl.grade.command import CommandGrader
from polar_trl.grade.function import FunctionGrader
from polar_trl.grade.gym import GymGrader
from polar_trl.harness import AGENTS
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import require_agents
from polar_trl.harness.shell import PLACEHOLDERS
from polar_trl.sandbox import build_backend, choose_kind
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.pool import WarmPool
from polar_trl.setup.agents import build_harness, read_mapping, take_own_tasks
from polar_trl.setup.check_tasks import TaskChecker, has_solution, has_tests
from polar_trl.tasks.environment import list_environments, provide_python, refuse_answers
from polar_trl.tasks.load import load_task_set
from polar_trl.tasks.rules import check_limits
from polar_trl.types import Task
from polar_trl.user_code import is_object_name, load_object

_PLAIN = Task(id="", instruction="")
_SECONDS = {name: getattr(_PLAIN, name) for name in ("prepare_timeout_s", "agent_timeout_s", "grade_timeout_s")}
"""Time limits of a task that does not say."""


@dataclass
class RunArguments:
    """The settings of tasks, agent, sandboxes and grader."""

    tasks: str | None = field(
        default=None,
        metadata={
            "help": "The tasks to train on: a file, a folder, or a data set. A JSONL file of tasks, a folder of "
            "Harbor tasks, rows of SWE-bench (.parquet, .json, .jsonl), or a data set of the hub, such as 'swe-gym'. "
            "See docs/tasks.md."
        },
    )
    agent: str = field(
        default="shell",
        metadata={
            "help": "The agent: a known name, a class of your own, or 'shell' for agent_command. The known ones are "
            f"{', '.join(AGENTS)}; a class is 'package.module:Class'. See polar-trl doctor."
        },
    )
    agent_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": 'Options of the agent, such as \'{"tools": ["bash"]}\'; docs/agents.md lists them. Those of '
            "agent_command: auxiliary_without_tools, where its requests without tools are no work on the task."
        },
    )
    agents: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Several agents in one run, such as {pi: {weight: 2}, codex: {}}. Each group is played by one of "
            "them, drawn by weight; `agent` names one, to run it alone. See docs/agents.md."
        },
    )
    mix_agents_in_groups: bool = field(
        default=False,
        metadata={"help": "Draw an agent of `agents` for each rollout of a group, and not one for the group."},
    )
    agent_command: str | None = field(
        default=None,
        metadata={
            "help": f"Shell command that runs the agent; {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)} are "
            "filled in."
        },
    )
    sandbox: str = field(
        default="auto",
        metadata={
            "help": "Where agents run: auto, bwrap, docker or local. 'bwrap' is bubblewrap: no network but the proxy, "
            "limits as root. 'docker' is the same in containers of Docker or Podman, 'auto' bwrap, or docker where an "
            "image is named and an engine can run it, 'local' a folder of this user without any boundary."
        },
    )
    sandbox_cluster: str | None = field(
        default=None,
        metadata={
            "help": "Run agents and graders on the nodes of a Ray cluster: 'auto' for the one of this machine, or "
            "'ray://host:port'. See docs/cluster.md."
        },
    )
    sandbox_image: str | None = field(
        default=None,
        metadata={
            "help": "Container image for tasks that name none: its name, or for bwrap an archive of docker save too."
        },
    )
    sandbox_memory_mb: int = field(default=4096, metadata={"help": "Memory of one sandbox, in MiB."})
    sandbox_cpus: float = field(default=2.0, metadata={"help": "Cores of one sandbox."})
    sandbox_pids: int = field(default=512, metadata={"help": "Processes and threads of one sandbox."})
    sandbox_disk_mb: int = field(default=4096, metadata={"help": "Work folder, HOME and /tmp of one sandbox, in MiB."})
    sandbox_warm: int = field(
        default=4,
        metadata={"help": "Sandboxes made ready before they are needed, while the model trains ('local' needs none)."},
    )
    eval_tasks: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What to evaluate on, in the forms of tasks; several sets by name: {easy: a.jsonl, hard: b.jsonl}."
        },
    )
    columns: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "What tasks have of the columns of a data set of any form, such as {image: '{docker_image}'}. See "
            "docs/tasks.md."
        },
    )
    eval_columns: dict[str, Any] | str | None = field(default=None, metadata={"help": "The same for eval_tasks."})
    prepare_timeout_s: float | None = field(
        default=None, metadata={"help": "Seconds to prepare a sandbox, for tasks that do not say; None: 120."}
    )
    agent_timeout_s: float | None = field(
        default=None, metadata={"help": "Seconds for the agent, for tasks that do not say; None: 600."}
    )
    grade_timeout_s: float | None = field(
        default=None, metadata={"help": "Seconds for grading, for tasks that do not say; None: 120."}
    )
    check_tasks: bool = field(
        default=True,
        metadata={
            "help": "Check the known solutions before the run. It does not start unless the graders give 1 to the "
            "solution of each task with tests and 0 to no change. Good results are kept; `polar-trl check-tasks` does "
            "the same."
        },
    )
    partial_credit: bool = field(
        default=False,
        metadata={"help": "Reward the share of the failing tests that pass; 0 where others broke."},
    )
    zero_suspected_cheats: bool = field(
        default=False,
        metadata={
            "help": "Reward 0 where a change has a sign of reward hacking. Such as a test framework, frames of "
            "callers or always-equal objects (counter cheats_suspected). Off: they are counted."
        },
    )
    agent_files: list[str] = field(
        default_factory=list,
        metadata={"help": "Files copied into the agent's HOME before it starts, with their executable bits."},
    )
    agent_folders: list[str] = field(
        default_factory=list,
        metadata={"help": "Folders of this machine that agent_command needs; sandboxes show them at the same path."},
    )
    grader: str | None = field(
        default=None,
        metadata={
            "help": "The reward: 'package.module:function', a shell command, or NeMo Gym's address. The function "
            "takes (task, sandbox), or (task, sandbox, calls); the command's exit code 0 is reward 1, and 1 is 0; the "
            "address is the head server's (docs/nemo-gym.md). Default: each task's own tests, verifier or command."
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunParts:
    """The agent, sandboxes and grader of a run: all that sessions need beside a model."""

    harness: Harness
    backend: SandboxBackend
    """To be closed by whoever holds it."""
    grader: Grader | None
    """None leaves it to the command that each task names."""


def build_parts(
    run: RunArguments,
    tasks: Sequence[Task],
    *,
    run_id: str,
    check_jobs: int,
    is_first: bool = True,
    limits: Mapping[str, int] = {},
) -> RunParts:
    """Build the parts, ready to run these tasks: a fault is found before minutes go into loading a model.

    Args:
        run_id: Under which its sandboxes are known.
        check_jobs: Tasks whose solutions are checked at a time.
        is_first: Whether this process is the one of its machine that says what goes on.
        limits: What is known of the `Endpoint`'s: the context window must leave room beside the agent's own prompt.

    Raises `ConfigError`.
    """
    harness = build_harness(run)
    require_agents(harness, tasks, **limits)
    needs_files = run.agents is None and run.agent == "shell" and not (run.agent_files or run.agent_folders)
    if is_first and (unused := find_unused_images(tasks, find_sandbox_kind(run, tasks), needs_files=needs_files)):
        print(unused, file=sys.stderr, flush=True)
    recipe = MachineRecipe(run=run, harness=harness, run_id=run_id, check_jobs=check_jobs, is_first=is_first)
    if run.sandbox_cluster is None:
        return recipe.build(tasks, tasks)
    from polar_trl.setup.cluster_parts import build_cluster_parts

    return build_cluster_parts(recipe, tasks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRecipe:
    """Builds the parts of one machine: of this one, or of a node of a cluster."""

    run: RunArguments
    harness: Harness
    run_id: str
    check_jobs: int
    is_first: bool

    def build(self, tasks: Sequence[Task], checked: Sequence[Task]) -> RunParts:
        """Build what these tasks need, and check the solutions of `checked`. Raises `ConfigError`, `SandboxError`."""
        run, harness = self.run, self.harness
        mounts = [*harness.folders, *list_environments(tasks)]
        backend = build_sandbox(run, tasks, mounts, self.run_id)
        try:
            grader = build_grader(run, tasks, backend)
            check_limits(tasks, build_limits(run), backend.capabilities)
            harness.install()
            refuse_answers(tasks, mounts)
            backend.prepare(tasks)
            if run.check_tasks and run.grader is None:
                require_good_tasks(run, checked, backend, jobs=self.check_jobs, is_first=self.is_first)
        except BaseException:
            backend.close()
            raise
        return RunParts(harness=harness, backend=backend, grader=grader)


def list_eval_sources(run: RunArguments) -> dict[str, str]:
    """List where the evaluation sets are, by name; a single one has the name "". Raises `ConfigError`."""
    given = run.eval_tasks
    if given is None:
        return {}
    if isinstance(given, str) and not given.lstrip().startswith("{"):  # as a flag, a mapping is JSON
        return {"": given}
    sources = read_mapping("eval_tasks", given)
    for name, source in sources.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name):
            raise ConfigError(f"eval_tasks has a set {name!r}; give a name of letters, digits, _ and -")
        if not isinstance(source, str):
            raise ConfigError(f"eval_tasks: the set {name!r} is {source!r}; give a file, a folder or a data set")
    if not sources:
        raise ConfigError("eval_tasks names no set; leave it out, or give {easy: a.jsonl, hard: b.jsonl}")
    return sources


def build_limits(run: RunArguments) -> Limits:
    """Build the limits of one sandbox."""
    return Limits(
        memory_mb=run.sandbox_memory_mb,
        cpus=run.sandbox_cpus,
        pids=run.sandbox_pids,
        disk_mb=run.sandbox_disk_mb,
    )


def find_sandbox_kind(run: RunArguments, tasks: Sequence[Task]) -> str:
    """Return the kind of the run's sandboxes, "auto" decided."""
    return choose_kind(run.sandbox, image=run.sandbox_image, tasks=tasks)


def find_unused_images(tasks: Sequence[Task], kind: str, *, needs_files: bool = False) -> str:
    """Say that sandboxes of this kind build no images, where something that tasks' own Dockerfiles install is missing.

    Args:
        kind: Of `choose_kind`.
        needs_files: An own agent is to run, and no file or folder is given for it.
    """
    contexts = [(task, Path(task.build_context)) for task in tasks if task.build_context is not None]
    built = [task for task, context in contexts if (context / "Dockerfile").is_file()]
    bare = [task for task in built if task.tests is None or task.tests.requirements is None]
    advice = ["tests.requirements for the tests"] * bool(bare) + ["agent_files for the agent"] * needs_files
    if kind == "docker" or not built or not advice:
        return ""
    return (
        f"the Dockerfiles of {len(built)} tasks are not used in {kind} sandboxes: give {' and '.join(advice)}, or "
        "take sandbox: docker"
    )


def build_sandbox(run: RunArguments, tasks: Sequence[Task], mounts: Sequence[Path], run_id: str) -> SandboxBackend:
    """Build the sandbox backend that the settings name, with a warm pool in front where making one takes time."""
    kind = find_sandbox_kind(run, tasks)
    backend = build_backend(kind, image=run.sandbox_image, limits=build_limits(run), mounts=mounts, run_id=run_id)
    # folders of this machine are made in no time
    return backend if kind == "local" else WarmPool(backend, depth=run.sandbox_warm)


def load_run_tasks(
    run: RunArguments, train: Sequence[Task] = (), evals: Sequence[Task] = ()
) -> tuple[list[Task], dict[str, list[Task]]]:
    """Load the tasks to train on, and the sets to evaluate on, with a Python for their tests where they need one.

    Args:
        train, evals: Tasks of another source, in the place of `run.tasks` and `run.eval_tasks`.

    Returns:
        The tasks to train on, and evaluation sets by name; a single one has the name "".
    """
    columns, eval_columns = read_columns(run)
    sets = {name: load_task_set(source, columns=eval_columns) for name, source in list_eval_sources(run).items()}
    sets = sets or ({"": list(evals)} if evals else {})
    train = take_own_tasks(run, train or load_task_set(require_tasks(run), columns=columns))
    sets = {name: take_own_tasks(run, tasks) for name, tasks in sets.items()}
    train, sets = limit_times(run, train), {name: limit_times(run, tasks) for name, tasks in sets.items()}
    kind = find_sandbox_kind(run, [*train, *chain.from_iterable(sets.values())])

    def provide(tasks: Sequence[Task]) -> list[Task]:
        return provide_python(tasks, sandbox=kind, image=run.sandbox_image)

    return provide(train), {name: provide(tasks) for name, tasks in sets.items()}


def read_columns(run: RunArguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what tasks and evaluation tasks have of their rows' columns. Raises `ConfigError`."""
    given = {"columns": run.columns, "eval_columns": run.eval_columns}
    columns, eval_columns = (read_mapping(name, value) if value else {} for name, value in given.items())
    return columns, eval_columns


def require_tasks(run: RunArguments) -> str:
    """Return the source of tasks. Raises `ConfigError` where none is named."""
    if run.tasks is None:
        raise ConfigError("tasks is needed, in the run file (--config) or as a flag (or dataset_name, to train on)")
    return run.tasks


def limit_times(run: RunArguments, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with the run's time limits where they have a task's default. Raises `ConfigError`."""
    given = {name: value for name in _SECONDS if (value := getattr(run, name)) is not None}
    for name, value in given.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be above 0 (it is {value!r})")
    return [
        replace(task, **{name: value for name, value in given.items() if getattr(task, name) == _SECONDS[name]})
        for task in tasks
    ]


def build_grader(run: RunArguments, tasks: Sequence[Task], backend: SandboxBackend) -> Grader | None:
    """Build the grader; None leaves it to the command that each task names."""
    by_task = run.grader is None and any(has_tests(task) for task in tasks)
    for name in ("partial_credit", "zero_suspected_cheats"):
        if getattr(run, name) and not by_task:
            raise ConfigError(f"{name} is for tasks with tests, graded by them; leave it or the grader out")
    if not by_task:
        grader = load_grader(run.grader, backend)
        if isinstance(grader, GymGrader):
            grader.check(tasks)
        elif rows := [task.id for task in tasks if "gym" in task.metadata and grader is None]:
            raise ConfigError(
                f"task {rows[0]!r} is a row of NeMo Gym, whose resources server gives the reward: give the address of "
                "Gym's head server as grader, such as http://127.0.0.1:11000 (docs/nemo-gym.md)"
            )
        return grader
    check_gradable(tasks, backend)
    return GraderByTask(backend, partial=run.partial_credit, zero_suspected=run.zero_suspected_cheats)


def require_good_tasks(
    run: RunArguments, tasks: Sequence[Task], backend: SandboxBackend, *, jobs: int, is_first: bool = True
) -> None:
    """Refuse tasks whose graders do not tell their solution from no change. Raises `ConfigError` with their ids."""
    wanted = [task for task in tasks if has_solution(task)]
    unknown = sum(has_tests(task) for task in tasks) - len(wanted)
    if is_first and unknown:
        print(f"{unknown} tasks have no known solution and are not checked", file=sys.stderr, flush=True)
    if not wanted:
        return
    if is_first:
        print(f"checking the solutions of {len(wanted)} tasks; good results are kept", file=sys.stderr, flush=True)
    checker = TaskChecker(
        backend, kind=find_sandbox_kind(run, tasks), image=run.sandbox_image, limits=build_limits(run), gold_runs=1
    )
    results = checker.check_all(wanted, jobs=jobs, show_progress=is_first)
    if bad := [checked for checked in results if checked.problem]:
        lines = [f"{checked.id}: {checked.problem}" for checked in bad[:20]]
        lines += [f"and {len(bad) - 20} more"] * (len(bad) > 20)
        raise ConfigError(
            f"{len(bad)} of {len(wanted)} tasks fail the check of their solutions; take them out, or set "
            "check_tasks: false\n  " + "\n  ".join(lines)
        )


def load_grader(spec: str | None, backend: SandboxBackend | None = None) -> Grader | None:
    """Load the grader that a setting names: an importable function, Gym's head server, or a shell command."""
    if spec is None:
        return None
    if spec.startswith(("http://", "https://")):
        return GymGrader(spec)
    if is_object_name(spec):
        function = load_object("grader", spec)
        if not callable(function):
            raise ConfigError(f"grader {spec!r} is a {type(function).__name__}, and must be a function")
        return FunctionGrader(function)
    return CommandGrader(spec, backend=backend)
