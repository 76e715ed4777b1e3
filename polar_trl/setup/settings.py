"""List the settings of a run in groups, with their dataclasses' help texts, for `--help` and docs/settings.md."""

import dataclasses
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Tasks and rewards": (
        *("tasks", "eval_tasks", "columns", "eval_columns", "check_tasks", "grader", "partial_credit"),
        "zero_suspected_cheats",
    ),
    "Agent": (
        *("agent", "agent_command", "agent_options", "agent_files", "agent_folders", "agents", "mix_agents_in_groups"),
    ),
    "Sandboxes": (
        *("sandbox", "sandbox_image", "sandbox_memory_mb", "sandbox_cpus", "sandbox_pids", "sandbox_disk_mb"),
        *("sandbox_warm", "sandbox_cluster"),
    ),
    "Sessions": (
        *("max_session_calls", "max_session_tokens", "max_completion_length", "prepare_timeout_s", "agent_timeout_s"),
        *("grade_timeout_s", "max_agents", "max_preparing", "max_grading", "max_policy_lag", "straggler_quantile"),
        *("retry_lost_sessions", "train_auxiliary", "train_turns", "cut_sessions", "show_rollout_progress"),
    ),
    "Tokens": ("renderer", "thinking", "max_trajectory_tokens"),
    "Training": (
        *(
            "turn_credit",
            "turn_credit_weight",
            "drop_zero_variance",
            "resample_zero_variance",
            "loss_type",
            "vllm_importance_sampling_mode",
        ),
        *("max_tokens_per_device", "sequence_layout", "weight_rounding", "logging_steps"),
    ),
    "Engine": ("engine_max_num_seqs", "engine_dtype", "engine_cuda_graphs", "engine_kwargs", "use_vllm"),
}
"""Group -> our settings, in the order in which they are shown. One that no group names is shown under "More"."""
MOST_USED = (
    *("model_name_or_path", "output_dir", "dataset_name", "reward_funcs", "max_steps", "num_generations"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "temperature"),
    *("vllm_max_model_length", "vllm_gpu_memory_utilization", "use_peft", "lora_r", "save_steps"),
    *("resume_from_checkpoint", "report_to", "seed"),
)
"""TRL's settings that most runs have."""
_WIDTH = 118


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A key of a run file, which is a flag as well."""

    name: str
    default: str
    """As a run file has it; "" where the setting is required or has none."""
    help: str


def list_groups(*kinds: type) -> dict[str, list[Setting]]:
    """List our settings by their groups: the fields of these dataclasses that the package itself declares."""
    ours = {
        field.name: _read(field)
        for kind in kinds
        for field in dataclasses.fields(kind)
        if any(field.name in get_annotations(cls) for cls in kind.__mro__ if cls.__module__.startswith("polar_trl."))
    }
    groups = {title: [ours.pop(name) for name in names if name in ours] for title, names in GROUPS.items()}
    return groups | ({"More": list(ours.values())} if ours else {})


def format_short_help(prog: str, *kinds: type) -> str:
    """Format a line for each of our settings and for the most used ones of TRL's."""
    theirs = {field.name: _read(field) for kind in kinds for field in dataclasses.fields(kind)}
    groups = list_groups(*kinds) | {
        "TRL's, those that most runs have": [theirs[name] for name in MOST_USED if name in theirs]
    }
    lines = [f"usage: {prog} [RUN_FILE] [--KEY VALUE ...]", ""]
    for title, settings in groups.items():
        lines.append(f"{title}:")
        for setting in settings:
            head = f"  --{setting.name} "
            default = f" [{setting.default}]" if setting.default else ""
            text = _first_sentence(setting.help)
            lines.append(
                f"{head:<34}{textwrap.shorten(text, _WIDTH - 34 - len(default), placeholder=' ...')}{default}"
            )
    lines.append(
        "\nEvery key of a run file is a flag. --help-all lists all of TRL's as well; docs/settings.md explains ours."
    )
    return "\n".join(lines) + "\n"


def format_page(*kinds: type) -> str:
    """Format docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Every key of a run file that is not TRL's, with its default. All are flags too (`--max_agents 32`). From",
        "Python, those of tasks, agent, sandboxes and grader are arguments of `PolarGRPOTrainer` (`train_dataset`,",
        "`harness`, `sandbox`, `grader`), and the others are fields of `PolarGRPOConfig`. TRL's keys are in",
        "[trl-arguments.md](trl-arguments.md). `scripts/dev/settings_page.py` writes this page from the help texts.",
    ]
    for title, settings in list_groups(*kinds).items():
        lines += ["", f"## {title}", "", "| key | default | what it does |", "|---|---|---|"]
        for setting in settings:
            default = f"`{setting.default}`" if setting.default else ""
            lines.append(f"| `{setting.name}` | {default} | {_escape(setting.help)} |")
    return "\n".join(lines) + "\n"


def _read(field: "dataclasses.Field[Any]") -> Setting:
    text = " ".join(str(field.metadata.get("help", "")).split())
    return Setting(name=field.name, default=_spell(field.default), help=text)


def _spell(default: Any) -> str:
    if default is dataclasses.MISSING or default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _first_sentence(text: str) -> str:
    """Return the text up to the first full stop or semicolon that a space follows."""
    return re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(".;")


def _escape(text: str) -> str:
    """Keep a help text's characters from being markup in a table."""
    return re.sub(r"([|<*])", r"\\\1", text)
