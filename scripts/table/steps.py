"""List the commands that make a table: warm-start data, SFT, GRPO, and evaluations, each as a user would type it."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polar_trl.configs import find_packaged, read_run_file
from polar_trl.errors import ConfigError

BASE = "base"
STAGES = ("base", "sft", "grpo", "both")
"""The model as it is; SFT on warm-start data; GRPO; GRPO from the SFT model."""
POLAR = (sys.executable, "-m", "polar_trl")
SFT = (sys.executable, "-m", "trl.scripts.sft")

SFT_FLAGS = shlex.split(
    "--num_train_epochs 1 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --learning_rate 5e-5"
)
"""As in docs/warm-start.md. TRL cuts rows off at 1024 tokens unless max_length says more: it is the run's window."""
OF_MACHINE = ("use_cpu", "bf16", "gradient_checkpointing", "report_to")
"""Keys of the run file that SFT on the same machine needs as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A row of the table: a stage, the agent that it was trained inside, and the seed of its training."""

    stage: str
    agent: str = ""
    """"" for the base model."""
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of its folder."""
        return BASE if self.stage == BASE else f"{self.stage}-{self.agent}-{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command, into the folder of its name."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Steps that must have ended well before."""
    goes_on: bool = True
    """Run again, it goes on with what its folder has."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is to be run, and where."""

    out: Path
    agents: Sequence[str]
    seeds: Sequence[int] = (0,)
    stages: Sequence[str] = STAGES
    config: str = "small/{agent}"
    """Run file; {agent} is filled in."""
    base: str | None = None
    """None: the run file's model."""
    tasks: str | None = None
    """To evaluate on; None: the run file's."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Models of stage grpo that were trained elsewhere, under the first seed."""
    matrix: bool = False
    """Each agent's final models inside every other agent."""
    data: Sequence[str] = ()
    sft: Sequence[str] = ()
    train: Sequence[str] = ()
    eval: Sequence[str] = ()
    """More flags of the commands."""

    def name_config(self, agent: str) -> str:
        """Name the agent's run file."""
        return self.config.replace("{agent}", agent)

    def read_config(self, agent: str) -> Mapping[str, object]:
        """Read the agent's run file. Raises `ConfigError`."""
        return read_run_file(self.name_config(agent))[0]

    @property
    def final(self) -> str | None:
        """The last stage, whose models the matrix has; None where nothing is trained."""
        return next((stage for stage in ("both", "grpo", "sft") if stage in self.stages), None)


def parse_model(name: str) -> Model | None:
    """Parse the name of a model's folder; None for another folder."""
    stage, _, rest = name.partition("-")
    agent, _, seed = rest.rpartition("-")
    if name == BASE:
        return Model(stage=BASE)
    return Model(stage=stage, agent=agent, seed=int(seed)) if stage in STAGES and agent and seed.isdecimal() else None


def name_cell(model: Model, agent: str) -> str:
    """Name the folder of a model's evaluation inside an agent."""
    return f"{model.name}__{agent}"


def list_models(agents: Sequence[str], seeds: Sequence[int], stages: Sequence[str]) -> list[Model]:
    """List all models of a table: the base model, then by seed, so that an early end leaves whole seeds."""
    base = [Model(stage=BASE)] if BASE in stages else []
    trained = [stage for stage in stages if stage != BASE]
    return base + [Model(stage=s, agent=agent, seed=seed) for seed in seeds for agent in agents for s in trained]


def list_steps(settings: Settings) -> list[Step]:
    """List all commands in their order, each once. Raises `ConfigError` for a run file that cannot be used."""
    steps: dict[str, Step] = {}
    for model in list_models(settings.agents, settings.seeds, settings.stages):
        inside = [model.agent] if model.agent else settings.agents
        made = [*_list_training(model, settings), *(_build_eval(model, agent, settings) for agent in inside)]
        steps |= {step.name: step for step in made if step.name not in steps}
    for model in list_models(settings.agents, settings.seeds, settings.stages) if settings.matrix else ():
        if model.stage == settings.final:
            others = (_build_eval(model, agent, settings) for agent in settings.agents)
            steps |= {step.name: step for step in others if step.name not in steps}
    return list(steps.values())


def list_training(model: Model) -> list[str]:
    """List the names of the steps that a model is made by."""
    data, sft = f"data-{model.agent}", f"sft-{model.agent}-{model.seed}"
    return {BASE: [], "sft": [data, sft], "grpo": [model.name], "both": [data, sft, model.name]}[model.stage]


def _list_training(model: Model, settings: Settings) -> Iterator[Step]:
    names = list_training(model)
    if _find_elsewhere(model, settings) is not None:
        return
    for place, name in enumerate(names):
        if name.startswith("data-"):
            command = _build_data(model.agent, name, settings)
        elif name.startswith("sft-"):
            command = _build_sft(model, names[0], name, settings)
        else:
            command = _build_train(model, settings)
        yield Step(name=name, command=tuple(command), needs=tuple(names[:place]), goes_on=not name.startswith("sft-"))


def _build_data(agent: str, name: str, settings: Settings) -> list[str]:
    """Accepted sessions of a program that knows the solutions of the training tasks."""
    run = ["--config", settings.name_config(agent), "--agent", agent, "--solutions", "true", "--test_share", "0"]
    model = ["--model_name_or_path", settings.base] if settings.base else []
    return [*POLAR, "collect", *run, *model, "--output_dir", str(settings.out / name), *settings.data]


def _build_sft(model: Model, data: str, name: str, settings: Settings) -> list[str]:
    flags = ["--model_name_or_path", find_packaged(find_base(settings, model.agent)), "--seed", str(model.seed)]
    flags += ["--dataset_name", str(settings.out / data / "dataset"), "--dataset_config", "tokens", *SFT_FLAGS]
    of_run = settings.read_config(model.agent)
    length = of_run.get("vllm_max_model_length")
    flags += ["--max_length", str(length)] if length else []
    flags += [word for key in OF_MACHINE if key in of_run for word in (f"--{key}", str(of_run[key]).lower())]
    return [*SFT, *flags, "--output_dir", str(settings.out / name), *settings.sft]


def _build_train(model: Model, settings: Settings) -> list[str]:
    config = settings.name_config(model.agent)
    run = [config, "--agent", model.agent, "--seed", str(model.seed), "--resume_from_checkpoint", "auto"]
    start = str(settings.out / f"sft-{model.agent}-{model.seed}") if model.stage == "both" else settings.base
    flags = ["--model_name_or_path", start] if start else []
    return [*POLAR, "train", *run, *flags, "--output_dir", str(settings.out / model.name), *settings.train]


def _build_eval(model: Model, agent: str, settings: Settings) -> Step:
    elsewhere = _find_elsewhere(model, settings)
    path = settings.base if model.stage == BASE else elsewhere or str(settings.out / model.name)
    flags = ["--config", settings.name_config(agent), "--agent", agent]
    flags += ["--tasks", settings.tasks] if settings.tasks else []
    flags += ["--model_name_or_path", path] if path else []
    name = name_cell(model, agent)
    command = [*POLAR, "eval", *flags, "--output_dir", str(settings.out / name), *settings.eval]
    needs = () if elsewhere else tuple(list_training(model))
    return Step(name=name, command=tuple(command), needs=needs)


def _find_elsewhere(model: Model, settings: Settings) -> str | None:
    is_first = model.stage == "grpo" and model.seed == settings.seeds[0]
    return settings.trained.get(model.agent) if is_first else None


def find_base(settings: Settings, agent: str) -> str:
    """Find the model before training. Raises `ConfigError` where neither a flag nor the run file names one."""
    name = settings.base or settings.read_config(agent).get("model_name_or_path")
    if not name:
        raise ConfigError(f"{settings.name_config(agent)} names no model; give --base")
    return str(name)


def require_saved(settings: Settings) -> None:
    """Raise `ConfigError` where a run would save no model: there would be nothing to evaluate."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--save_strategy")
    given = flags.parse_known_args(settings.train)[0].save_strategy
    for agent in settings.agents if {"grpo", "both"} & set(settings.stages) else ():
        if agent in settings.trained:
            continue
        source, value = f"--train={shlex.join(settings.train)}", given
        if given is None:
            source, value = settings.name_config(agent), settings.read_config(agent).get("save_strategy")
        if value in ("no", False):  # YAML's `no` is false
            flag = shlex.quote("--save_strategy steps")
            raise ConfigError(
                f"{source} has save_strategy: no, so that its runs leave no model to evaluate; give --train {flag}"
            )
