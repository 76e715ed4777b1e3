"""Lint a chat template: find the turns of a conversation that it rewrites in later requests, and the forks they cost.

The conversation is a probe (`probe`) or a recorded session; `written` finds each turn in the template's output,
`compare` names the difference on the tokens, `lint` puts the answer together. Only the output counts, never the
template's source.
"""

from polar_trl.tools.lint_template.compare import Kind, Rewrite, TokenPair
from polar_trl.tools.lint_template.lint import lint
from polar_trl.tools.lint_template.load import LoadedModel, load_calls, load_model
from polar_trl.tools.lint_template.report import LintReport, PolicyReport, TurnReport

__all__ = [
    "Kind",
    "LintReport",
    "LoadedModel",
    "PolicyReport",
    "Rewrite",
    "TokenPair",
    "TurnReport",
    "lint",
    "load_calls",
    "load_model",
]
