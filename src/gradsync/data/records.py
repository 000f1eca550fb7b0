"""Records: files and data sets in which every row is a document, in the order in which they lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsync.data.documents import Intake
from gradsync.errors import ConfigError, DataError, MissingExtraError

_ROWS_PER_READ = 1000


def read_jsonl(path: Path, text_field: str, intake: Intake) -> Iterator[str]:
    """The text field of every line of a JSON-lines file; blank lines are passed over."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                intake.num_bytes += len(line)
                if line.strip():
                    yield _text_of(_parse(line, f"{path}:{number}"), text_field, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_parquet(path: Path, text_field: str, intake: Intake) -> Iterator[str]:
    """The text column of a parquet file."""
    parquet = _import_parquet(path)
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} as parquet: {error}") from error
    with file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise _no_field(text_field, columns, str(path))
        num_bytes, num_rows = path.stat().st_size, max(file.metadata.num_rows, 1)
        row = 0
        for batch in _batches_of(file, text_field, path):
            for text in batch.column(0).to_pylist():
                yield _check_text(text, text_field, f"{path} (row {row})")
                row += 1
            intake.num_bytes += num_bytes * batch.num_rows // num_rows


def read_dataset(name: str, config: str | None, split: str, text_field: str) -> Iterator[str]:
    """The text field of a Hugging Face data set (a name on the hub or a local folder), streamed."""
    rows = _open_dataset(name, config, split)
    for number, row in enumerate(rows):
        yield _text_of(row, text_field, f"{name} (row {number})")


def _batches_of(file: Any, text_field: str, path: Path) -> Iterator[Any]:
    try:
        yield from file.iter_batches(batch_size=_ROWS_PER_READ, columns=[text_field])
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: it is damaged ({error}); get the file again") from error


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}; every line must be one JSON object") from error


def _text_of(row: Any, text_field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}, expected an object with a text field")
    if text_field not in row:
        raise _no_field(text_field, list(row), where)
    return _check_text(row[text_field], text_field, where)


def _check_text(text: Any, text_field: str, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {text_field!r} holds {type(text).__name__}, expected text")
    return text


def _no_field(text_field: str, fields: list[str], where: str) -> DataError:
    return DataError(
        f"{where} has no field {text_field!r} (it has: {', '.join(fields)}); "
        f"name it with --text-field of gradsync prepare"
    )


def _import_parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path} needs pyarrow; install it with: pip install 'gradsync[datasets]'"
        ) from error
    return parquet


def _open_dataset(name: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            "--dataset needs the datasets library; install it with: pip install 'gradsync[datasets]'"
        ) from error
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except ValueError as error:
        raise ConfigError(f"the data set {name!r} cannot be opened: {error}") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the data set {name!r} could not be had: {error}; give a name on the hub (needs a network) or "
            f"the path of a local data set"
        ) from error
