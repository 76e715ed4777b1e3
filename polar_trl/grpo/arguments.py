"""A run file and flags -> the settings of a run: one YAML file is a whole run, every key of it can be a flag.

It refuses keys that nobody reads, with the nearest known name.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl import ModelConfig, TrlParser
from yaml import YAMLError  # type: ignore[import-untyped]

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.harness import AGENTS


@dataclass
class RunArguments:
    """What to train on, and in which agent."""

    tasks: str = field(
        metadata={
            "help": "What to train on: a JSONL file of tasks, a folder of Harbor tasks, rows of SWE-bench "
            "(.parquet, .json, .jsonl), or a data set of the hub, such as 'swe-gym'. See docs/tasks.md."
        }
    )
    agent: str = field(
        default="shell",
        metadata={
            "help": f"The agent: one of {', '.join(AGENTS)}, or 'shell' for whatever agent_command runs. "
            "See polar-trl doctor."
        },
    )
    agent_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of the named agent, such as '{\"short_prompt\": true}'; docs/agents.md lists them."
        },
    )
    agent_command: str | None = field(
        default=None,
        metadata={
            "help": "Shell command that runs the agent; {instruction}, {model}, {base_url}, {api_key} are filled in."
        },
    )
    sandbox: str = field(
        default="local",
        metadata={
            "help": "Where agents run: 'local' (folders of this user, no isolation), 'bwrap' (bubblewrap: no network "
            "but the proxy; limits as root) or 'docker' (the same in containers)."
        },
    )
    sandbox_image: str | None = field(
        default=None, metadata={"help": "Container image for tasks that name none (docker only)."}
    )
    sandbox_memory_mb: int = field(default=4096, metadata={"help": "Memory of one sandbox."})
    sandbox_cpus: float = field(default=2.0, metadata={"help": "Cores of one sandbox."})
    sandbox_pids: int = field(default=512, metadata={"help": "Processes and threads of one sandbox."})
    sandbox_disk_mb: int = field(default=4096, metadata={"help": "Work folder, HOME and /tmp of one sandbox."})
    sandbox_warm: int = field(
        default=4,
        metadata={"help": "Sandboxes made ready before they are needed, while the model trains ('local' needs none)."},
    )
    eval_tasks: str | None = field(default=None, metadata={"help": "What to evaluate on, in the forms of tasks."})
    check_tasks: bool = field(
        default=True,
        metadata={
            "help": "Refuse to start unless the graders give 1 to the known solution of each task with tests and 0 to "
            "no change. Good results are kept; `polar-trl check-tasks` does the same."
        },
    )
    partial_credit: bool = field(
        default=False,
        metadata={"help": "Reward the share of the failing tests that pass, where none of the others broke."},
    )
    agent_files: list[str] = field(
        default_factory=list, metadata={"help": "Files copied into the agent's HOME before it starts."}
    )
    agent_folders: list[str] = field(
        default_factory=list,
        metadata={"help": "Folders of this machine that agent_command needs; sandboxes show them at the same path."},
    )
    grader: str | None = field(
        default=None,
        metadata={
            "help": "What a session is worth: 'package.module:function' taking (task, sandbox), or a shell command "
            "(exit code 0 is reward 1, 1 is 0). Default: what each task names: its tests, its verifier or its command."
        },
    )


class RunParser(TrlParser):  # type: ignore[misc]
    """TRL's parser of the three groups of settings."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__((RunArguments, PolarGRPOConfig, ModelConfig), **kwargs)


def parse_run(
    parser: RunParser, arguments: Sequence[str] | None = None
) -> tuple[RunArguments, PolarGRPOConfig, ModelConfig]:
    """Settings from `--config FILE` and flags, which win; None reads the command line.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value cannot work.
    """
    try:
        run, args, model = parser.parse_args_and_config(None if arguments is None else list(arguments))
    except (OSError, YAMLError) as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        raise
    except ValueError as error:
        known = [name for group in parser.dataclass_types for name in group.__dataclass_fields__]
        words = [word.strip("-'\"[],.=") for word in str(error).split()]
        near = [m for word in words for m in difflib.get_close_matches(word, known, 1, 0.8) if m != word]
        raise ConfigError(f"{error}" + (f" Did you mean {near[0]!r}?" if near else "")) from error
    return run, args, model


def refuse_unread(model_config: ModelConfig) -> None:
    """Keys of TRL's `ModelConfig` that a run does not pass on must not look as if it did."""
    for item in dataclasses.fields(ModelConfig):
        name, value = item.name, getattr(model_config, item.name)
        if name == "model_name_or_path" or name == "use_peft" or name.startswith(("lora_", "use_rslora", "use_dora")):
            continue
        if value != getattr(ModelConfig(), name):
            raise ConfigError(f"{name} is not read here; give it through model_init_kwargs instead")
