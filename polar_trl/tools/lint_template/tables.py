"""Print a `LintReport` on the terminal: tables of turns and policies, and the tokens of one example per kind."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar_trl.tools.lint_template.compare import Rewrite
from polar_trl.tools.lint_template.load import Policy
from polar_trl.tools.lint_template.report import LintReport, TurnReport

_POLICIES: Mapping[Policy, str] = {
    "keep": "prompts go on from the sampled tokens, also where the template would drop earlier reasoning",
    "template": "where the template drops earlier reasoning, prompts are rendered anew and fork",
}
_MAX_ROWS = 40
"""Turns up to which unchanged ones are listed too."""


def print_report(report: LintReport) -> None:
    """Print the turns, one example of each kind of rewriting, the policies and the verdict."""
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


def describe_kinds(rewrite: Rewrite) -> str:
    """Describe the kinds of a rewriting in words."""
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


def _build_turn_table(report: LintReport) -> Table:
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


def _pick_examples(report: LintReport) -> list[tuple[TurnReport, Rewrite]]:
    """Pick the first rewriting of each set of kinds."""
    examples: dict[str, tuple[TurnReport, Rewrite]] = {}
    for turn in report.turns:
        for rewrite in turn.rewrites:
            examples.setdefault(describe_kinds(rewrite), (turn, rewrite))
    return list(examples.values())


def _build_pair_table(rewrite: Rewrite) -> Table:
    table = Table("sampled", "template", box=None, padding=(0, 4, 0, 2), header_style="bold")
    for pair in rewrite.pairs:
        if pair.num_skipped:
            table.add_row(*(Text(f"   ... {pair.num_skipped} equal", style="dim"),) * 2)
        style = "dim" if pair.is_equal else "red" if pair.sampled else "green"
        table.add_row(_show(pair.sampled, style), _show(pair.written, style))
    if rewrite.num_more:
        table.add_row(f"   ... {rewrite.num_more} more that differ", "")
    return table


def _show(token: tuple[int, str] | None, style: str) -> Text:
    return Text("" if token is None else f"{token[0]:>6} {token[1]!r}", style=style)


def _build_policy_table(report: LintReport) -> Table:
    table = Table("thinking", "conversations", "trajectories", "forks", "refused")
    for name, policy in report.policies.items():
        numbers = (policy.conversations, policy.trajectories, policy.forks)
        table.add_row(name, *map(str, numbers), "no" if policy.refusal is None else "yes")
    return table
