"""Text files: pieces that lose nothing, cut where GPT-2's tokens end; bytes that are not UTF-8."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.data import documents
from gradsync.data.documents import Intake, cut_into_pieces, line_start, read_text
from gradsync.data.tokenizer import load_tokenizer
from gradsync.errors import DataError

_TEXT = """The quick brown fox: it's 12345 times as quick!\n\n\n    Indented, with  two blanks\t and tabs.
Łódź, 日本語 and 🙂 too.\r\nA line\n\n"""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 7)


@settings(max_examples=200)
@given(
    chunks=st.lists(st.text("ab \n\té", max_size=30), max_size=8),
    limit=st.integers(2, 20),
)
def test_pieces_are_the_whole_and_small(chunks: list[str], limit: int) -> None:
    pieces = list(cut_into_pieces(chunks, limit))
    assert "".join(text for text, _ in pieces) == "".join(chunks)
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(0 < len(text) <= limit for text, is_last in pieces if not is_last)


@pytest.mark.parametrize("limit", [60, 75, 100, 200])
def test_pieces_have_the_tokens_of_the_whole(limit: int, gpt2_files: Path) -> None:
    tokenizer = load_tokenizer("gpt2")
    text = _TEXT * 20
    pieces = [token for piece, _ in cut_into_pieces([text], limit) for token in tokenizer.encode(piece)]
    assert pieces == tokenizer.encode(text).tolist()


@pytest.mark.usefixtures("small_blocks")
@given(text=st.text(max_size=60))
def test_blocks_that_cut_characters_do_no_harm(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(text.encode())
    intake = Intake()
    read = "".join(read_text(path, 0, path.stat().st_size, intake))
    assert read == text.removeprefix("\ufeff")
    assert intake.notes() == []
    assert intake.num_bytes == len(text.encode())


@pytest.mark.usefixtures("small_blocks")
@given(raw=st.binary(min_size=1, max_size=40))
def test_any_bytes_are_read_as_python_reads_them(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.txt"
    path.write_bytes(raw)
    intake = Intake()
    assert "".join(read_text(path, 0, len(raw), intake)) == raw.decode("utf-8-sig", errors="replace")
    try:
        raw.decode()
    except UnicodeDecodeError:
        assert intake.replaced == [str(path)]
    else:
        assert intake.replaced == []


@pytest.mark.parametrize(
    ("content", "position", "expected"),
    [
        (b"one\ntwo\nthree", 1, 4),
        (b"one\ntwo\nthree", 4, 4),
        (b"one\ntwo\nthree", 5, 8),
        (b"one\ntwo", 5, 5),
        ("aé".encode() * 9, 5, 6),
    ],
)
def test_a_cut_moves_to_the_next_line_or_character(
    tmp_path: Path, content: bytes, position: int, expected: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert line_start(path, position) == expected


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(DataError, match="has become shorter while it was read"):
        list(read_text(path, 0, 100, Intake()))


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt"):
        list(read_text(tmp_path / "gone.txt", 0, 10, Intake()))


def test_what_is_left_out_as_binary_is_told_by_kind() -> None:
    assert Intake(binary=["a/b.pyc"]).notes() == ["left out as binary: a/b.pyc"]
    names = [*(f"{n}.pyc" for n in range(40)), *(f"{n}.so" for n in range(5)), "x/tool", "tool", "a.png", "b.gif"]
    assert Intake(binary=names).notes() == [
        "left out as binary: 49 files (40 .pyc, 5 .so, 2 without a suffix, 2 others)"
    ]
    assert Intake(binary=["a.pyc", "b.pyc"]).notes() == ["left out as binary: 2 files (2 .pyc)"]


def test_one_huge_text_is_cut_as_the_same_text_in_blocks_is() -> None:
    text = "".join(f"line {n} of it\n" if n % 7 else "w" * (n % 90) for n in range(3000))
    whole = list(cut_into_pieces([text], 100))
    blocks = list(cut_into_pieces([text[i : i + 333] for i in range(0, len(text), 333)], 100))
    assert whole == blocks
    assert "".join(piece for piece, _ in whole) == text
    assert max(len(piece) for piece, _ in whole) <= 100
