"""Parse a run's settings from a YAML file and flags: one file is a whole run, and every key of it can be a flag.

An unknown key raises `ConfigError` with the nearest known name, as does a value of another type.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from trl import ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from polar_trl.configs import find_config, find_packaged
from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trl_arguments.refused import refuse_keys, refuse_model_kwargs
from polar_trl.setup.run_setup import RunArguments
from polar_trl.setup.settings import format_short_help

_WANTED = {"int": "a whole number", "float": "a number", "str": "text", "string_to_bool": "true or false"}


class RunParser(TrlParser):  # type: ignore[misc]
    """TRL's parser of the groups of settings of a run, and of what another command adds to them.

    What is wrong is a `ConfigError`; argparse would print its usage, which is some hundred lines, and exit. `--help`
    is a line for each of our settings, `--help-all` is argparse's, of more than a thousand lines.

    Args:
        more: Dataclasses of settings.
    """

    def __init__(self, *more: type, **kwargs: Any) -> None:
        groups = (RunArguments, PolarGRPOConfig, ModelConfig, *more, GRPOScriptArguments)
        super().__init__(groups, allow_abbrev=False, **kwargs)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="list TRL's as well")
        self.run_file: tuple[str, str] | None = None
        """Path and text of the run file that was read."""

    def read_file(self, path: str) -> None:
        """Take the defaults from a run file (path or name), read as flags would be. `env` sets the environment."""
        content, text = read_run_file(path)
        environment = content.pop("env", {})
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        self.run_file = path, text
        actions = {action.dest: action for action in self._actions if action.nargs != 0}
        self._refuse_unknown(path, [str(name) for name in content if name not in actions])
        hints = {name: hint for group in self.dataclass_types for name, hint in get_type_hints(group).items()}
        try:
            values = {name: self._convert(actions[name], hints[name], value) for name, value in content.items()}
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        self.set_defaults_with_config(**values)

    def format_help(self) -> str:
        """Return the short help."""
        about = f"{self.description.strip()}\n\n" if self.description else ""
        return about + format_short_help(self.prog, *self.dataclass_types)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but raise `ConfigError` for an unknown flag."""
        found, rest = super().parse_known_args(args, namespace)
        names = [word.split("=")[0] for word in rest if word.startswith("--")]
        self._refuse_unknown("flags", names or rest)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` in the place of argparse's usage and exit."""
        required = "the following arguments are required: --"
        if message.startswith(required):
            raise ConfigError(f"{message.removeprefix(required)} is needed, in the run file (--config) or as a flag")
        raise ConfigError(message.removeprefix("argument "))

    def _convert(self, action: argparse.Action, hint: Any, value: Any) -> Any:
        """Convert a value of the file. argparse looks at texts alone, and at no text's choices."""
        kinds = [
            kind
            for part in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,))
            for kind in (map(type, get_args(part)) if get_origin(part) is Literal else (get_origin(part) or part,))
        ]
        if value is None and type(None) not in kinds:
            raise ConfigError(f"{action.dest} has no value; give {_describe_wanted(action)}, or leave it out")
        is_list = isinstance(value, list) and action.nargs == "+"
        if isinstance(value, str) or is_list:
            return self._get_values(action, [str(item) for item in value] if is_list else [value])
        if type(value) in kinds or (type(value) is int and float in kinds):
            return value
        if action.type is str or isinstance(value, bool | list | dict):
            quotes = ", in quotes" if action.type is str or action.choices else ""
            raise ConfigError(f"{action.dest} is {value!r}; give {_describe_wanted(action)}{quotes}")
        return self._get_values(action, [str(value)])

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{action.dest} is {arg_string!r}; give {_describe_wanted(action)}") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise ConfigError(f"{action.dest} is {value!r}; give {_describe_wanted(action)}")

    def _refuse_unknown(self, source: str, names: Sequence[str]) -> None:
        if not names:
            return
        known = [action.dest for action in self._actions if not action.dest.startswith("help")]
        words = (name.lstrip("-").replace("-", "_") for name in names)
        near = [repr(match) for word in words for match in difflib.get_close_matches(word, known, 1)]
        advice = f". Did you mean {', '.join(near)}?" if near else "; leave it out"
        raise ConfigError(f"{source}: nothing reads {', '.join(names)}{advice}")


def read_run_file(name: str, *, is_base: bool = False) -> tuple[dict[str, Any], str]:
    """Read a run file (path or name) over its `base`: another one, by a path relative to it or as `polar_trl:PATH`.

    Its own keys win, and within mappings (`agent_options`, `env`) the keys there. Returns the keys, and the text of a
    file that holds them all. Raises `ConfigError`.
    """
    try:
        path = find_config(name)
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except ConfigError as error:
        raise ConfigError(f"--config: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {name} cannot be read ({error.strerror}); give a run file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {name} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("env", {}), dict):
        raise ConfigError(f"--config {name} must be a mapping, lines of `key: value`, and so must its env")
    if (base := content.pop("base", None)) is None:
        return content, text
    if is_base:
        raise ConfigError(f"--config: {name} is the base of another run file, and cannot have a base itself")
    below, _ = read_run_file(str(path.parent / find_packaged(str(base))), is_base=True)
    for key, value in content.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        below[key] = below[key] | value if both else value
    return below, yaml.safe_dump(below, sort_keys=False, allow_unicode=True)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(argparse.ArgumentParser.format_help(parser))
        parser.exit()


def parse_run(
    parser: RunParser, arguments: Sequence[str] | None = None
) -> tuple[RunArguments, PolarGRPOConfig, ModelConfig]:
    """Parse settings from `--config FILE` and flags, which win; None: the command line. Raises as `parse_groups`."""
    run, args, model, *_ = parse_groups(parser, arguments)
    return run, args, model


def parse_groups(parser: RunParser, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the same, with what the parser reads `more`, and TRL's keys of scripts: one object of each dataclass.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value cannot work.
    """
    path, flags = _take_config(sys.argv[1:] if arguments is None else arguments)
    if path is not None:
        parser.read_file(path)
    try:
        groups = tuple(parser.parse_args_into_dataclasses(flags))
    except OSError as error:
        raise ConfigError(f"{error.filename}, which a setting names, cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"a setting is {error.doc!r}, and that is no JSON: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _pass_on(groups[1], groups[2])
    refuse_keys(groups[-1])
    return groups


def _pass_on(args: PolarGRPOConfig, model: ModelConfig) -> None:
    """Give what TRL's `ModelConfig` says of loading the model to `model_init_kwargs`, as `trl grpo` does."""
    refuse_keys(model)
    given = {name: getattr(model, name) for name in ("dtype", "attn_implementation")}
    given = {name: value for name, value in given.items() if value != getattr(ModelConfig(), name)}
    if given:
        args.model_init_kwargs = {**given, **(args.model_init_kwargs or {})}
        refuse_model_kwargs(args)


def _take_config(words: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the run file, the last if several are given, and the other words."""
    path, rest, words = None, [], iter(words)
    for word in words:
        if word == "--config":
            path = next(words, "")
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
        else:
            rest.append(word)
    if path == "":
        raise ConfigError("--config names no file; give a run file")
    return path, rest


def _describe_wanted(action: argparse.Action) -> str:
    if action.choices is not None:
        return "one of " + ", ".join(map(str, action.choices))
    return _WANTED.get(getattr(action.type, "__name__", ""), "what --help says of it")
