"""From batches of Arrow rows to plain rows."""

from __future__ import annotations

from typing import Any, cast


def rows(batch: Any) -> list[dict[str, Any] | None]:
    """The rows of a batch or table; None for one whose text is not UTF-8, found by halving.

    >>> import pyarrow
    >>> text = pyarrow.array([b"one", b"\\xff", b"three"])
    >>> rows(pyarrow.table({"text": text.view("string")}))
    [{'text': 'one'}, None, {'text': 'three'}]
    """
    try:
        return cast(list[dict[str, Any] | None], batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        half = batch.num_rows // 2
        return rows(batch.slice(0, half)) + rows(batch.slice(half))
