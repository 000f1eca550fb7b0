"""Records: JSON lines, parquet and data sets; what is wrong with a row is said with its place."""

import json
from pathlib import Path

import pytest

from gradsync.data.documents import Intake
from gradsync.data.records import read_dataset, read_jsonl, read_parquet
from gradsync.errors import ConfigError, DataError

_TEXTS = ["first", "zweites — ü", "", "line\nbreak"]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(_TEXTS)) + "\n\n")
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as parquet_module

    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"id": list(range(4)), "text": _TEXTS})
    parquet_module.write_table(table, path, row_group_size=3)
    return path


def test_json_lines(jsonl: Path) -> None:
    intake = Intake()
    assert list(read_jsonl(jsonl, "text", intake)) == _TEXTS
    assert intake.num_bytes == jsonl.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"rows\.jsonl:2 is not JSON"),
        ('["text"]', r"rows\.jsonl:2 is a JSON list, expected an object"),
        ('{"text": ' + "[" * 100_000, r"rows\.jsonl:2 is not JSON"),
        (
            '{"content": "x", "id": 1}',
            r"rows\.jsonl:2 has no field 'text' \(it has: content, id\).*--text-field",
        ),
        ('{"text": 5}', r"rows\.jsonl:2: the field 'text' holds int, expected text"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_jsonl(path, "text", Intake()))


def test_parquet(parquet: Path) -> None:
    intake = Intake()
    assert list(read_parquet(parquet, "text", intake)) == _TEXTS
    assert intake.num_bytes == parquet.stat().st_size


def test_parquet_without_the_field(parquet: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet has no field 'content' \(it has: id, text\)"):
        list(read_parquet(parquet, "content", Intake()))


def test_what_is_no_parquet_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "foreign.parquet"
    path.write_text("no parquet")
    with pytest.raises(DataError, match=r"cannot read .*foreign\.parquet as parquet"):
        list(read_parquet(path, "text", Intake()))


def test_a_local_data_set(parquet: Path) -> None:
    pytest.importorskip("datasets")
    assert list(read_dataset(str(parquet.parent), None, "train", "text")) == _TEXTS


def test_a_data_set_without_the_field(parquet: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"\(row 0\) has no field 'content' \(it has: id, text\)"):
        list(read_dataset(str(parquet.parent), None, "train", "content"))


def test_a_split_that_is_not_there(parquet: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match="the data set .* cannot be opened"):
        list(read_dataset(str(parquet.parent), None, "test", "text"))


def test_a_data_set_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the data set .* could not be had.*needs a network"):
        list(read_dataset(str(tmp_path / "empty"), None, "train", "text"))


def test_a_row_of_parquet_without_text_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as parquet_module

    path = tmp_path / "rows.parquet"
    parquet_module.write_table(pyarrow.table({"text": ["a", "b", None]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet \(row 2\): the field 'text' holds NoneType, expected text"):
        list(read_parquet(path, "text", Intake()))


def test_damage_in_the_middle_of_a_parquet_file_is_its_own(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as parquet_module

    path = tmp_path / "rows.parquet"
    texts = [f"text {n} of many, {n * n}" for n in range(5000)]
    parquet_module.write_table(pyarrow.table({"text": texts}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    for i in range(len(content) // 4, len(content) // 2):
        content[i] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*rows\.parquet: it is damaged"):
        list(read_parquet(path, "text", Intake()))
