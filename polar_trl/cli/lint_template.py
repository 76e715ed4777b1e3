"""`polar-trl lint-template`: which turns of a conversation a model's chat template rewrites, and what that means here.

Refuses to print more than one example of a kind on a terminal; `--json` has them all.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polar_trl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from polar_trl.tools.lint_template import LintReport, Rewrite, TurnReport
    from polar_trl.types import Call

EPILOG = """\
examples:
  polar-trl lint-template Qwen/Qwen3.5-4B
  polar-trl lint-template path/to/model --thinking template
  polar-trl lint-template path/to/model --session runs/first/sessions/0/train_00000/train-00000-g000-r000.jsonl
  polar-trl lint-template path/to/model --chat_template_kwargs '{"enable_thinking": false}' --json

Only the tokenizer and config.json are read. Without --session, the conversation is a probe: reasoning, tool calls,
arguments of unusual spelling, whitespace, a turn that was cut off, a sub-agent. Exits with 1 if a call could not
continue from what was sampled before it; see docs/templates.md.
"""

_POLICIES: Mapping[str, str] = {
    "keep": "prompts go on from the sampled tokens, also where the template would drop earlier reasoning",
    "template": "where the template drops earlier reasoning, prompts are rendered anew and fork",
}
_MAX_ROWS = 40
"""Turns up to which unchanged ones are listed too."""


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "lint-template",
        help="which turns a model's chat template rewrites, shown on the tokens",
        description="Compare what a model sampled with what its chat template writes for it in later requests.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or hub name with a tokenizer")
    parser.add_argument(
        "--thinking",
        choices=("keep", "template"),
        default="keep",
        help="what a run does with earlier reasoning (default: %(default)s)",
    )
    parser.add_argument("--renderer", metavar="NAME", help="as `renderer` of a run (default: found out)")
    parser.add_argument("--chat_template_kwargs", metavar="JSON", help="as `chat_template_kwargs` of a run")
    parser.add_argument("--session", type=Path, metavar="FILE", help="a recorded session to take instead of the probe")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run_lint_template)


def run_lint_template(args: argparse.Namespace) -> int:
    """`polar-trl lint-template`."""
    # transformers and renderers; the other subcommands start without
    from polar_trl.tools.lint_template import lint, load_calls, load_model

    kwargs = _parse_kwargs(args.chat_template_kwargs)
    recorded = load_calls(args.session) if args.session else None
    model = load_model(args.model, family=args.renderer, template_kwargs=kwargs)
    report = lint(
        model,
        policy=args.thinking,
        recorded=recorded,
        source=str(args.session) if args.session else "probe",
        track=_track,
    )
    if args.json:
        print(json.dumps(_build_json(report)))
    else:
        _print(report)
    return 0 if report.is_exact else 1


def _parse_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat_template_kwargs {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--chat_template_kwargs must be a JSON object such as {{}}, not {text!r}")
    return value


def _track(calls: "Sequence[Call]") -> "Iterable[Call]":
    from tqdm import tqdm

    return tqdm(calls, desc="calls compared", leave=False, disable=None, file=sys.stderr)


def _build_json(report: "LintReport") -> dict[str, Any]:
    plain = asdict(report)
    for name, policy in report.policies.items():
        plain["policies"][name]["exact"] = policy.is_exact
    return {"exact": report.is_exact, "verdict": report.verdict, **plain}


def describe_kinds(rewrite: "Rewrite") -> str:
    """The kinds of a rewriting in words."""
    names: Mapping[str, str] = {
        "reasoning": "reasoning dropped" if rewrite.drops_reasoning else "reasoning marks changed",
        "arguments": "arguments re-serialised",
        "whitespace": "whitespace changed",
        "special tokens": "special tokens changed",
        "tokens": "same text, other tokens",
        "other": "text changed",
        "not found": "not found",
        "refused": "refused",
    }
    return ", ".join(names[kind] for kind in rewrite.kinds)


def _print(report: "LintReport") -> None:
    from rich.console import Console

    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    renderer = "the tokenizer's own chat template" if report.renderer == "template" else f"family {report.renderer}"
    say(f"{report.model}: {renderer}")
    policy = f"thinking={report.policy}: {_POLICIES[report.policy]}"
    why = [line for line in report.why if line != renderer]
    for line in (*why, policy, *report.limits, *report.notes):
        say(f"  - {line}")
    console.print(_build_turn_table(report))
    for turn, rewrite in _pick_examples(report):
        console.print()
        say(f"call {turn.call}, {turn.name}: {describe_kinds(rewrite)}, {rewrite.since} (call {rewrite.call})")
        if rewrite.detail:
            say(f"  {rewrite.detail}")
        if rewrite.pairs:
            console.print(_build_pair_table(rewrite))
    for change in report.context_changes[:1]:
        console.print()
        say(f"other messages change too, from call {change.call} on: {change.before!r} becomes {change.after!r}")
    console.print()
    console.print(_build_policy_table(report))
    say(f"Can it be continued exactly with thinking={report.policy}? {report.verdict}.")


def _build_turn_table(report: "LintReport") -> "Table":
    from rich.table import Table

    table = Table("call", "turn", "tokens", "what the template changes, and from which call on", "in prompts")
    is_long = len(report.turns) > _MAX_ROWS
    num_hidden = 0
    for turn in report.turns:
        forks_at = turn.forks_at[report.policy]
        if is_long and not turn.rewrites and forks_at is None:
            num_hidden += 1
            continue
        found = [f"{describe_kinds(rewrite)} ({rewrite.call})" for rewrite in turn.rewrites]
        changes = "\n".join(found) or ("nothing" if turn.is_followed else "-")
        kept = "-" if not turn.is_followed else "as sampled" if forks_at is None else f"anew ({forks_at})"
        table.add_row(str(turn.call), turn.name, str(turn.num_tokens), changes, kept)
    if num_hidden:
        table.add_row("", f"{num_hidden} others", "", "nothing", "as sampled")
    return table


def _pick_examples(report: "LintReport") -> "list[tuple[TurnReport, Rewrite]]":
    """The first rewriting of each set of kinds."""
    examples: dict[str, tuple[TurnReport, Rewrite]] = {}
    for turn in report.turns:
        for rewrite in turn.rewrites:
            examples.setdefault(describe_kinds(rewrite), (turn, rewrite))
    return list(examples.values())


def _build_pair_table(rewrite: "Rewrite") -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table("sampled", "template", box=None, padding=(0, 4, 0, 2), header_style="bold")
    for pair in rewrite.pairs:
        if pair.num_skipped:
            table.add_row(*(Text(f"   ... {pair.num_skipped} equal", style="dim"),) * 2)
        style = "dim" if pair.is_equal else "red" if pair.sampled else "green"
        table.add_row(_show(pair.sampled, style), _show(pair.written, style))
    if rewrite.num_more:
        table.add_row(f"   ... {rewrite.num_more} more that differ", "")
    return table


def _show(token: tuple[int, str] | None, style: str) -> "Text":
    from rich.text import Text

    return Text("" if token is None else f"{token[0]:>6} {token[1]!r}", style=style)


def _build_policy_table(report: "LintReport") -> "Table":
    from rich.table import Table

    table = Table("thinking", "conversations", "trajectories", "forks", "refused")
    for name, policy in report.policies.items():
        numbers = (policy.conversations, policy.trajectories, policy.forks)
        table.add_row(name, *map(str, numbers), "no" if policy.refusal is None else "yes")
    return table
