"""Render the data set's card, whose header tells `datasets.load_dataset` where the examples are.

Licenses are left out: those of the tasks, of their repositories and of the model are the user's to know.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from huggingface_hub import DatasetCardData

if TYPE_CHECKING:
    from polar_trl.collect.data_set import Report

ABOUT = {
    "tokens": "`input_ids` and `assistant_masks`: the ids as the model read and sampled them; a mask of 1 is on "
    "what it sampled. For the model that they were sampled from, or one with the same tokenizer and chat template.",
    "messages": "`messages` and `tools`: the same conversations, for any model with a chat template.",
}


Files = Mapping[str, Mapping[str, str]]
"""Paths in the data set by form and split, of those that have examples."""


def render_card(report: "Report", files: Files, selection: Mapping[str, Any], *, agent: str, model: str) -> str:
    """Render README.md of a data set.

    Args:
        selection: The settings that chose the rows, by name.
    """
    lines = ["---", DatasetCardData(configs=_build_configs(files)).to_yaml(), "---", ""]
    lines += [f"# Sessions of {agent} with {model}", ""]
    how = (
        f"{report.total.accepted} of {report.total.attempts} graded sessions were accepted (a reward of "
        f"{selection['min_reward']:g} or more); {report.total.failed} more failed without a reward and are in no rate."
        if report.is_graded
        else f"{report.total.accepted} sessions chosen by name. None was graded: a reward of 1 stands for that choice."
    )
    lines += [f"Collected by `polar-trl collect`: {how}", ""]
    if report.text_only_rows:
        lines += [
            f"**Text only:** {report.text_only_rows} rows come from a server that gives no token ids. They are in "
            "`messages` alone, and what was sampled can only be tokenized again.",
            "",
        ]
    lines += ["| form | train | test | columns |", "|---|---|---|---|"]
    for form in files:
        train, test = (report.num_rows(form, split) for split in ("train", "test"))
        lines.append(f"| `{form}` | {train} | {test} | {ABOUT[form]} |")
    lines += ["", "Each row also has `id`, `task_id`, `repo`, `reward`, `session` and `agent`.", ""]
    if report.is_graded:
        lines += _render_rates(report)
    lines += ["Left out: " + (_list_counts(report.left_out) or "nothing") + ".", ""]
    unread = () if report.is_graded else ("min_reward",)
    settings = ", ".join(
        f"{name} {value}" for name, value in selection.items() if value is not None and name not in unread
    )
    lines += [f"Made with {settings}.", ""]
    return "\n".join(lines)


def _render_rates(report: "Report") -> list[str]:
    lines = ["| repository | tasks | attempts | accepted | rate % | failed |", "|---|---|---|---|---|---|"]
    for repo, counts in [*report.by_repo.items(), ("total", report.total)]:
        rate = "-" if counts.rate is None else f"{100 * counts.rate:.1f}"
        lines.append(f"| {repo} | {counts.tasks} | {counts.attempts} | {counts.accepted} | {rate} | {counts.failed} |")
    return [*lines, ""]


def _build_configs(files: Files) -> list[dict[str, Any]]:
    """Build the header's `configs`; the first form is the default one."""
    configs: list[dict[str, Any]] = []
    for form, paths in files.items():
        data_files = [{"split": split, "path": path} for split, path in paths.items()]
        configs.append({"config_name": form, "default": not configs, "data_files": data_files})
    return configs


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} rows ({name.replace('_', ' ')})" for name, count in counts.items())
