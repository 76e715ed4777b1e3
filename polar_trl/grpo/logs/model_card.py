"""Write a model card: what the model was trained from, in which agent, on which tasks, with which result.

Front matter is the hub's (https://huggingface.co/docs/hub/model-cards#model-card-metadata). No path of this machine is
in it: cards are published.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from polar_trl.grpo.logs.evaluations import format_solved, list_evaluations
from polar_trl.grpo.logs.summary import average_quarters

CARD_FILE = "README.md"
_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "num_generations", "generation_batch_size", "temperature", "beta",
    "loss_type", "scale_rewards", "max_completion_length", "max_trajectory_tokens", "num_iterations",
    "lora_r", "lora_alpha",
)  # fmt: skip

_CARD = """---
{head}---

# {name}

{whole} trained with [GRPO](https://huggingface.co/papers/2402.03300) inside {where}, by polar-trl and TRL.
Each reward is of a whole session of that agent, with the agent's own prompts and tools.

| | |
|---|---|
{rows}

{use}
## Settings

{arguments}

{versions}

## License

That of the base model, {base}.
"""
_USE = """## How to use it

Inside the same agent: elsewhere it has not been trained, and may be no better than its base model.
Install polar-trl (its README says how).

```bash
polar-trl serve {model}{comment}
```

It prints an address and a key for the agent's configuration. Another server does as well, such as vLLM's, with the
chat template of this folder and the base model's parsers of tool calls and thinking. In Python:

```python
{imports}

model = {loader}.from_pretrained("{model}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{model}")
```
"""
_USE_SECTION = re.compile(r"^## How to use it\n.*?(?=^\n## Settings\n)", re.DOTALL | re.MULTILINE)
_ADAPTER = re.compile(r"^A LoRA adapter for (.*), trained with ", re.MULTILINE)
_TAG = "polar-trl"


def build_card(
    settings: Mapping[str, Any],
    log_history: Sequence[Mapping[str, Any]],
    *,
    name: str,
    seconds: float,
    tags: Sequence[str] = (),
    is_adapter: bool = False,
    hub_id: str | None = None,
) -> str:
    """Build the text of a model's README.md.

    Args:
        settings: Of `settings.json`; what it lacks is left out.
        log_history: TRL's, one entry per logged step.
        name: The model's.
        seconds: Of training so far.
        is_adapter: Whether the folder holds a LoRA adapter and not the whole model.
        hub_id: Where it is pushed to.
    """
    base = str(settings.get("model") or "")
    is_folder = Path(base).is_absolute() or base.startswith(".") or Path(base).is_dir()
    shown_base = Path(base).name if is_folder else f"[{base}](https://huggingface.co/{base})"
    head: dict[str, Any] = {} if is_folder or not base else {"base_model": base}
    head |= {
        "library_name": "peft" if is_adapter else "transformers",
        "model_name": name,
        "pipeline_tag": "text-generation",
        "tags": sorted({*tags, _TAG, "agent"}),
    }
    agent = " ".join(str(settings[key]) for key in ("agent", "agent_version") if settings.get(key))
    facts = [("Base model", shown_base), ("Agent", agent), ("Tasks", _describe_tasks(settings))]
    facts += [*_list_figures(settings, log_history), *_describe_time(settings, seconds)]
    return _CARD.format(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        name=name,
        whole=f"A LoRA adapter for {shown_base}," if is_adapter else shown_base,
        use=_describe_use(hub_id, is_adapter=is_adapter),
        base=shown_base,
        where="a coding agent" if settings.get("agent") == "shell" else f"the coding agent {agent}",
        rows="\n".join(f"| {title} | {_escape(value)} |" for title, value in facts if value),
        arguments=_list_arguments(settings),
        versions=_list_versions(settings),
    )


def build_merged_card(card: str) -> str | None:
    """Build the card of an adapter merged into its base from the adapter's; None where that one is not ours."""
    start, _, body = card.partition("\n---\n")
    try:
        head = yaml.safe_load(start.removeprefix("---\n"))
    except yaml.YAMLError:
        return None
    if not isinstance(head, dict) or _TAG not in (head.get("tags") or ()):
        return None
    head["library_name"] = "transformers"
    body = _ADAPTER.sub(r"\1 trained with ", body, count=1)
    body = _USE_SECTION.sub(lambda _: _describe_use(None, is_adapter=False), body)
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n{body}"


def _describe_use(hub_id: str | None, *, is_adapter: bool) -> str:
    loader, imports = "AutoModelForCausalLM", "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if is_adapter:
        loader = "AutoPeftModelForCausalLM"
        imports = f"from peft import {loader}\nfrom transformers import AutoTokenizer"
    comment = "" if hub_id else "     # this folder, or its name on the hub"
    return _USE.format(model=hub_id or "MODEL", comment=comment, loader=loader, imports=imports)


def _list_figures(settings: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    steps = [entry for entry in log_history if entry.get("reward") is not None]
    if not steps:
        return []
    first, last = average_quarters([entry["reward"] for entry in steps])
    limit = settings.get("max_steps") or 0
    tokens = {
        kind: int(sum(entry.get(f"polar/{kind}_tokens") or 0 for entry in steps)) for kind in ("sampled", "trained")
    }
    figures = [
        ("Steps", f"{steps[-1].get('step', len(steps))}{f' of {limit}' if limit > 0 else ''}"),
        ("Reward of the first and last quarter of the steps", f"{first:.3g}, {last:.3g}"),
    ]
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for evaluation in list_evaluations(log_history):
        by_set.setdefault(evaluation["set"], []).append(evaluation)
    for name, found in by_set.items():
        of_set = f" of {name}" if name else ""
        titles = ("First evaluation", "Last evaluation") if len(found) > 1 else ("Evaluation",)
        figures += [
            (f"{title}{of_set}", _describe_evaluation(found[place]))
            for title, place in zip(titles, (0, -1), strict=False)
        ]
    figures.append(("Tokens", f"{tokens['sampled']:,} sampled, {tokens['trained']:,} of them trained"))
    return figures


def _describe_evaluation(found: Mapping[str, Any]) -> str:
    reward = "no reward" if found["reward"] is None else f"reward {found['reward']:.3g}"
    return f"{reward} at step {found['step']}, solved {format_solved(found, '')}"


def _describe_tasks(settings: Mapping[str, Any]) -> str:
    name = Path(str(settings.get("arguments", {}).get("tasks") or "")).name
    counts = [
        f"{settings[key]:,} for {use}"
        for key, use in (("num_tasks", "training"), ("num_eval_tasks", "evaluation"))
        if settings.get(key)
    ]
    return f"{name}{' (' if name else ''}{', '.join(counts)}{')' if name else ''}" if counts else name


def _describe_time(settings: Mapping[str, Any], seconds: float) -> list[tuple[str, str]]:
    starts = settings.get("starts") or [{}]
    hardware = starts[-1].get("hardware") or {}
    gpus = hardware.get("gpus") or []
    where = f"{len(gpus)} x {gpus[0]}" if gpus else f"{hardware.get('cpus', '?')} CPU cores"
    minutes = round(seconds / 60)
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{minutes} minute{'s' * (minutes != 1)}"
    return [("Training", f"{time} on {where}")]


def _list_arguments(settings: Mapping[str, Any]) -> str:
    arguments = settings.get("arguments") or {}
    names = _ARGUMENTS if arguments.get("use_peft") else [name for name in _ARGUMENTS if not name.startswith("lora_")]
    named = [f"`{name}: {arguments[name]}`" for name in names if arguments.get(name) is not None]
    return (", ".join(named) + ".") if named else "Not known."


def _list_versions(settings: Mapping[str, Any]) -> str:
    versions = (settings.get("starts") or [{}])[-1].get("versions") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name != "system")


def _escape(text: str) -> str:
    """Keep a text in its cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
