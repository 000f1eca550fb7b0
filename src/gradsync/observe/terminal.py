"""Text from data, models and other people's files, made fit for a terminal: it can be read, and does nothing.

A control character could move the cursor, change colours, retitle the window or hide what follows; on a terminal
each is shown as a replacement character. What goes to a file or a pipe is left as it is.
"""

import sys
from typing import IO

_KEPT = {"\n", "\t"}
_CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT]
# These turn the direction of writing, so that a line may look like another one.
_DIRECTIONS = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]
_HARMLESS = str.maketrans(dict.fromkeys([*_CONTROLS, *_DIRECTIONS], "\N{REPLACEMENT CHARACTER}"))


def harmless(text: str) -> str:
    """Return the text with every control character replaced, but for line ends and tabs."""
    return text.translate(_HARMLESS)


def fit_for(stream: IO[str], text: str) -> str:
    """Return what may be written to a stream: the text itself, unless the stream is a terminal."""
    return harmless(text) if stream.isatty() else text


def say(text: str, stream: IO[str] | None = None, end: str = "\n") -> None:
    """Print what may hold text of others, to standard output if no stream is given."""
    stream = stream or sys.stdout
    print(fit_for(stream, text), end=end, file=stream, flush=True)
