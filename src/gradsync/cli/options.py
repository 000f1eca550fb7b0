"""Option parsing shared by the commands: jsonargparse with one-line errors and the nearest name.

Builds the options of ``gradsync train`` from the fields of ``TrainConfig``. Imports no torch.
"""

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from gradsync.errors import ConfigError
from gradsync.train.config import TrainConfig, flag


class Parser(ArgumentParser):
    """A parser whose errors are one line and name the option as it is typed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kinds: dict[str, Any] = {}
        self._titled: dict[str, Any] = {}

    def option(self, name: str, kind: Any, default: Any, help_text: str, group: str | None = None) -> None:
        """Add an option (or, without dashes, a positional argument) of a type; a False one takes no value."""
        self._kinds[name.lstrip("-").replace("-", "_")] = kind
        target = self if group is None else self._group(group)
        if kind is bool and default is False:
            target.add_argument(name, action="store_true", help=help_text)
        elif name.startswith("-"):
            target.add_argument(name, type=kind, default=default, help=help_text)
        else:
            target.add_argument(name, type=kind, help=help_text)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        """Raise what is wrong, with the nearest option where a name is unknown."""
        raise ConfigError(f"{self._plain(' '.join(message.split()))}; see '{self.prog} --help'")

    def _plain(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (\S+)", message, re.IGNORECASE)
        if unknown:
            return nearest(unknown[1], [option for action in self._actions for option in action.option_strings])
        # Parser key "lr": Expected a <class 'float'>. Got value: x
        wrong = re.match(r'Parser key "(\w+)".*(?:Got|Given) value: (.*)', message)
        if wrong and wrong[1] in self._kinds:
            return f"{flag(wrong[1])} is {wrong[2]!r}; expected {spell(self._kinds[wrong[1]])}"
        return message

    def _group(self, title: str) -> Any:
        if title not in self._titled:
            self._titled[title] = self.add_argument_group(title)
        return self._titled[title]


def spell(kind: Any) -> str:
    """Return what values a type stands for, in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in words:
        return words[kind]
    parts = [spell(part) for part in get_args(kind)] if get_origin(kind) is not Literal else []
    return " or ".join(parts) if parts else f"one of {', '.join(map(str, get_args(kind)))}"


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


def check_can_be_written(option: str, path: str | None) -> None:
    """Check, before work is done whose result goes there, that a file has a folder to lie in.

    Raises:
        ConfigError: it has none, or is a folder itself.
    """
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: there is no such folder")
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it is a folder; name a file")


def check_model(path: str) -> None:
    """Check that the module of MODULE:FUNCTION can be found, before torch is imported for it.

    Raises:
        ConfigError: it cannot.
    """
    top = path.partition(":")[0].partition(".")[0]
    is_here = bool(top) and PathFinder.find_spec(top, [os.getcwd()]) is not None
    if top and not is_here and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError(f"--model {path}: No module named {top!r}; give MODULE:FUNCTION, importable from this folder")


def add_config_options(parser: Parser) -> None:
    """Add an option for every field of ``TrainConfig``, in its groups."""
    types = get_type_hints(TrainConfig)
    for spec in fields(TrainConfig):
        parser.option(flag(spec.name), types[spec.name], spec.default, spec.metadata["help"], spec.metadata["group"])


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
    return checked_options(parser, options, path)


def checked_options(parser: Parser, options: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return options that were read from a file, each of its kind.

    Raises:
        ConfigError: one has a value of another kind.
    """
    try:
        return dict(vars(parser.parse_object(options, defaults=False)))
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from error
