"""Option parsing shared by the commands: jsonargparse with one-line errors and the nearest name.

Builds the options of ``gradsync train`` from the fields of ``TrainConfig``. Imports no torch.
"""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from gradsync.errors import ConfigError
from gradsync.train.config import TrainConfig, flag


class Parser(ArgumentParser):
    """A parser whose errors are one line on standard error and exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Say what is wrong, with the nearest option where the name is unknown, and exit."""
        raise ConfigError(f"{self._plain(message)}; see '{self.prog} --help'")

    def _plain(self, message: str) -> str:
        one_line = " ".join(message.split())
        unknown = re.match(r"unrecognized arguments: (\S+)", one_line, re.IGNORECASE)
        if unknown:
            return nearest(unknown[1], [option for action in self._actions for option in action.option_strings])
        # Parser key "lr": Expected a <class 'float'>. Got value: x
        wrong = re.match(r'Parser key "([^"]+)": .*?(?:typing\.)?(?:Expected an? )(.*)\. Got value: (.*)', one_line)
        if not wrong:
            return one_line
        expected = re.sub(r"<class '(\w+)'>|(?:typing\.)?Literal(\[.*\])", r"\1\2", wrong[2])
        return f"{flag(wrong[1])} is {wrong[3]!r}; expected {expected}"


def new_parser(command: str, description: str) -> Parser:
    """Return an empty parser for a command."""
    return Parser(prog=f"gradsync {command}", description=description, default_env=False, allow_abbrev=False)


def nearest(given: str, known: Sequence[str]) -> str:
    """Return the message for an unknown option, with the one that was probably meant."""
    name = given.split("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {given!r}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")


def add_config_options(parser: Parser) -> None:
    """Add an option for every field of ``TrainConfig``, in its groups."""
    types = get_type_hints(TrainConfig)
    groups: dict[str, Any] = {}
    for spec in fields(TrainConfig):
        title = spec.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title)) if title not in groups else groups[title]
        name, text = flag(spec.name), spec.metadata["help"]
        if types[spec.name] is bool and spec.default is False:
            group.add_argument(name, action="store_true", help=text)
        else:
            group.add_argument(name, type=types[spec.name], default=spec.default, help=text)


def given_options(parser: Parser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options that a command line gives, those of its ``--config`` file below its own.

    Raises:
        ConfigError: an option is unknown or has a value of the wrong kind, in the line or the file.
    """
    line = vars(parser.parse_args(list(arguments), defaults=False))
    file = line.pop("config", None)
    return {**(_read_file(parser, Path(file)) if file else {}), **line}


def print_config(options: dict[str, Any]) -> None:
    """Print options as a configuration file."""
    yaml.safe_dump(options, sys.stdout, sort_keys=False)


def _read_file(parser: Parser, path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold options as 'name: value' lines")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    known = {spec.name for spec in fields(TrainConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(f"{nearest(flag(name), [flag(other) for other in known])} (in {path})")
    try:
        return dict(vars(parser.parse_object(options, defaults=False)))
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from error
