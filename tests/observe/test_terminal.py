"""Text of others on a terminal: what can be read stays, what would act is replaced."""

import io
import os

import pytest

from gradsync.observe.progress import open_view
from gradsync.observe.terminal import fit_for, harmless, lasting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HARMFUL = ["\x1b[2J", "\x1b]0;title\x07", "\r", "\x08\x08", "\x9b1A", "\x7f", "\u202e", "\u2066", "\x00"]


@pytest.mark.parametrize("text", HARMFUL)
def test_what_would_act_is_replaced(text: str) -> None:
    shown = harmless(f"before{text}after")
    assert not set(shown) & set("\x1b\x07\r\x08\x9b\x7f\u202e\u2066\x00")
    assert shown.startswith("before") and shown.endswith("after")


def test_what_can_be_read_stays() -> None:
    text = "Línea 1,\n\tзвук, 東京, שלום, \N{GRINNING FACE} \N{COMBINING ACUTE ACCENT}"
    assert harmless(text) == text


def test_a_pipe_gets_what_was_written_and_a_terminal_what_is_harmless() -> None:
    assert fit_for(io.StringIO(), "\x1b[2J") == "\x1b[2J"
    assert "\x1b" not in fit_for(Terminal(), "\x1b[2J")


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "caf\u00e9 ? \u2192"), ("ascii", "caf? ? ?")])
def test_what_an_encoding_cannot_say_is_no_error(encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    assert fit_for(stream, "caf\u00e9 \udcff \u2192") == shown
    stream.write(fit_for(stream, "caf\u00e9 \udcff \u2192"))


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_notes_and_errors_cannot_act(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gradsync.cli.main import fail

    stream = io.StringIO()
    view = open_view(mode, stream, 1)  # type: ignore[arg-type]
    view.note("saved \x1b[2J")
    view.close()
    fail("gradsync train", "no file \x1b[2J", 1)
    assert "\x1b[2J" not in stream.getvalue() + capsys.readouterr().err
    assert "saved" in stream.getvalue()


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_view_whose_reader_has_gone_goes_on_in_silence(mode: str) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        view = open_view(mode, lasting(stream), 1)  # type: ignore[arg-type]
        view.note("heard")
        os.close(reader)
        for _ in range(3):
            view.note("not heard")
        view.close()
