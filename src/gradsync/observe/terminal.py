"""Text from data, models and other people's files, made fit for a terminal: it can be read, and does nothing.

A control character could move the cursor, change colours, retitle the window or hide what follows; on a terminal
each is shown as a replacement character. What goes to a file or a pipe is left as it is. And a stream for what outlives
its reader.
"""

import os
import sys
from typing import IO, Any

_KEPT = {"\n", "\t"}
_CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT]
# These turn the direction of writing, so that a line may look like another one.
_DIRECTIONS = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]
_HARMLESS = str.maketrans(dict.fromkeys([*_CONTROLS, *_DIRECTIONS], "\N{REPLACEMENT CHARACTER}"))


def harmless(text: str) -> str:
    """Return the text with every control character replaced, but for line ends and tabs."""
    return text.translate(_HARMLESS)


class Lasting:
    """A stream whose reader may go away (a closed pipe, a terminal that hung up); then nothing is shown, or fails."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if anybody reads."""
        try:
            return self._stream.write(text)
        except OSError:
            self._turn_away()
            return len(text)

    def flush(self) -> None:
        """Flush, if anybody reads."""
        try:
            self._stream.flush()
        except OSError:
            self._turn_away()

    def _turn_away(self) -> None:
        # What is still in the stream's buffer has to go somewhere, at the latest when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def lasting(stream: IO[str]) -> IO[str]:
    """Return the stream for output that a run can do without."""
    return Lasting(stream)  # type: ignore[return-value]


def fit_for(stream: IO[str], text: str) -> str:
    """Return what may be written to a stream: the text itself, but for what its encoding or a terminal cannot take."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    writable = text.encode(encoding, "replace").decode(encoding)
    return harmless(writable) if stream.isatty() else writable


def say(text: str, stream: IO[str] | None = None, end: str = "\n") -> None:
    """Print what may hold text of others, to standard output if no stream is given."""
    stream = stream or sys.stdout
    print(fit_for(stream, text), end=end, file=stream, flush=True)
