"""The ``gradsync`` command: finds the subcommand and imports its module, and only that one.

No command's module imports torch before its options are parsed, so ``--help`` is quick everywhere.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted after saving, 143 terminated after saving.
"""

import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from gradsync import __version__
from gradsync.errors import ConfigError, GradsyncError
from gradsync.observe.terminal import harmless

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

COMMANDS = {
    "train": ("gradsync.cli.train", "train a GPT on text, on one or many processes"),
    "prepare": ("gradsync.cli.prepare", "turn text into token shards to train on"),
    "eval": ("gradsync.cli.eval", "take a trained run's loss on text, or its accuracy on completion tasks"),
    "export": ("gradsync.cli.export", "write a trained run in the form of another library"),
    "report": ("gradsync.cli.report", "write a page about one or several runs"),
    "bench": ("gradsync.cli.bench", "time a training step under different engines, side by side"),
    "explain": ("gradsync.cli.explain", "write a page that explains data-parallel training with a real run"),
    "prove": ("gradsync.cli.prove", "show that every way of training computes what one process does"),
    "doctor": ("gradsync.cli.doctor", "say what will not work on this machine or these hosts, and what to do"),
    "sample": ("gradsync.cli.sample", "print text from a trained run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help_text())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"gradsync {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(COMMANDS)}"
        return fail("gradsync", f"unknown command '{name}'{hint}", EXIT_USAGE)
    return _run(name, rest)


def fail(program: str, message: str, code: int) -> int:
    """Print one line about an error and return the exit code."""
    print(harmless(f"{program}: error: {message}"), file=sys.stderr)
    return code


def exit_code_of(error: GradsyncError) -> int:
    """Return the exit code for an error: usage or failure."""
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def stop_signals() -> set[signal.Signals]:
    """Return the signals by which a user, a terminal or a scheduler asks a command to end."""
    return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def _module_of(name: str) -> Any:
    """Import a command's module; the threads that numpy starts meanwhile never take a signal that is meant for us."""
    if not hasattr(signal, "pthread_sigmask"):
        return importlib.import_module(COMMANDS[name][0])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        return importlib.import_module(COMMANDS[name][0])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(name: str, arguments: list[str]) -> int:
    try:
        code: int = _module_of(name).main(arguments)
    except GradsyncError as error:
        return _refuse(name, error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; what is left in the buffer has nowhere to go.
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_FAILED
    return code


def _refuse(name: str, error: GradsyncError) -> int:
    from gradsync.cli.speaker import let_speak, told_here

    code, message = exit_code_of(error), told_here(error)
    if message is None:
        let_speak(code)
        return code
    return fail(f"gradsync {name}", message, code)


def _help_text() -> str:
    lines = ["usage: gradsync COMMAND [options]", "", __doc_line__, "", "commands:"]
    lines += [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "'gradsync COMMAND --help' tells the options of a command", "", *_EXIT_CODES]
    return "\n".join(lines)


__doc_line__ = "Distributed data-parallel training for PyTorch in plain Python."
_EXIT_CODES = (
    "exit codes: 0 done; 1 failed; 2 wrong usage, such as an unknown option or a path that does not exist;",
    "130 interrupted and 143 terminated, once everything is saved",
)


if __name__ == "__main__":
    sys.exit(main())
