"""A model's tokenizer and a conversation -> which of its turns the chat template rewrites later, and what that costs.

The conversation is a probe (`probe`) or a recorded session; `written` finds each turn in what the template writes,
`compare` names the difference on the tokens, `lint` puts the answer together. Refuses to guess from a template's
source: only what it writes counts.
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
