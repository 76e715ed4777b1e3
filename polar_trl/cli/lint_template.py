"""`polar-trl lint-template`: which turns of a conversation a model's chat template rewrites.

A terminal gets one example of each kind; `--json` has them all.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError

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


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl lint-template`."""
    # transformers and renderers; the other subcommands start without
    from tqdm import tqdm

    from polar_trl.tools.lint_template import lint, load_calls, load_model
    from polar_trl.tools.lint_template.tables import print_report

    kwargs = _parse_kwargs(args.chat_template_kwargs)
    recorded = load_calls(args.session) if args.session else None
    model = load_model(args.model, family=args.renderer, template_kwargs=kwargs)
    report = lint(
        model,
        policy=args.thinking,
        recorded=recorded,
        source=str(args.session) if args.session else "probe",
        track=partial(tqdm, desc="calls compared", leave=False, disable=None, file=sys.stderr),
    )
    if args.json:
        print(json.dumps(report.render()))
    else:
        print_report(report)
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
