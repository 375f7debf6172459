"""Parquet files: opened, and the texts of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from configs.schema import ConfigError
from data.corpus.documents import BadLine, Document, Span
from data.corpus.rows import check_text, other_key


def open_parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.corpus: {path} is no readable Parquet file: {str(error).splitlines()[0]}") from error


def read_parquet(span: Span, text_key: str) -> Iterator[Document | BadLine]:
    file = open_parquet(span.path)
    if text_key not in file.schema_arrow.names:
        rows = next(file.iter_batches(batch_size=1), None)
        raise ConfigError(
            f"data.text_key={text_key}: {span.shown} has no such column; its columns are "
            f"{', '.join(file.schema_arrow.names)}"
            + (other_key(rows.to_pylist()[0], span.shown) if rows is not None and rows.num_rows else "")
        )
    row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
    for group in range(span.start, span.end):
        for value in _column(file, group, text_key, span):
            text, reason = check_text(value, text_key)
            yield BadLine(span.shown, row + 1, reason) if reason else Document(f"{span.name}@{row}", text)
            row += 1


def _column(file: Any, group: int, text_key: str, span: Span) -> Iterator[Any]:
    """The values of a row group's column; bytes where a string is no UTF-8. Raises ConfigError for a damaged file."""
    import pyarrow

    try:
        column = file.read_row_group(group, columns=[text_key]).column(0)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        # As bytes: a writer may have stored text as binary, and a string that is no UTF-8 costs one row, not the file.
        is_text = any(is_type(column.type) for is_type in _text_types())
        values = (column.cast(pyarrow.large_binary()) if is_text else column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.corpus: {span.shown} cannot be read in row group {group}: {str(error).splitlines()[0]}"
        ) from error
    for value in values:
        if is_text and value is not None:
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError:
                pass  # reported as what is no text
        yield value


def _text_types() -> list[Callable[[Any], bool]]:
    from pyarrow import types

    return [
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_fixed_size_binary,
    ]
