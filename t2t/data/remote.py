"""The bytes of files and of http:// and https:// addresses, read on where reading failed."""

from __future__ import annotations

import io
import os
import time
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from t2t.errors import InputError

TIMEOUT = 30.0
"""Seconds without a byte after which a server counts as failed."""
WAIT = 1.0
"""Seconds before the first try again; each further one waits twice as long, at most a minute."""

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_TRY_AGAIN = (408, 425, 429)  # like all from 500 on; others of the 400s are answers


def is_remote(file: str | Path) -> bool:
    """Whether a name is an address rather than a file.

    >>> is_remote("https://example.org/pairs.jsonl.gz"), is_remote("pairs.jsonl.gz")
    (True, False)
    """
    return str(file).startswith(("http://", "https://"))


class Patient(io.RawIOBase):
    """A file or an address that is opened again at the same byte where it fails, ``retries`` times in a row at most.

    A server is asked for the rest alone; where it sends all, what was read before is passed over.

    >>> Patient("no-such-file").read(1)
    Traceback (most recent call last):
    t2t.errors.InputError: no-such-file: cannot be opened: No such file or directory
    """

    def __init__(self, file: str, retries: int = 0) -> None:
        self.file, self.retries = file, retries
        self._at = self._failures = 0
        self._size: int | None = None  # of all, as the server told first
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte; from the end of files alone."""
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}
        to = offset + (begin[whence] if whence in begin else os.stat(self.file).st_size)
        if self._stream is not None and not is_remote(self.file):
            self._stream.seek(to)
        elif to != self._at:
            self._drop()
        self._at = to
        return to

    def readinto(self, buffer: Any) -> int:
        """Read some bytes; 0: there are no more."""
        while True:
            try:
                if self._stream is None:
                    self._stream = self._open()
                count = int(self._stream.readinto(buffer))
                if not count and len(buffer) and getattr(self._stream, "length", 0):
                    raise ConnectionError(f"the connection ended at byte {self._at:,}")
            except (OSError, HTTPException) as error:
                self._wait(error)
                continue
            self._failures = 0
            self._at += count
            return count

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _wait(self, error: OSError | HTTPException) -> None:
        """Before the next try, if there is one."""
        self._drop()
        what = str(error) if isinstance(error, HTTPError) else getattr(error, "strerror", None) or _reason(error)
        if isinstance(error, _FINAL):
            raise InputError(f"{self.file}: cannot be opened: {what}") from None
        if isinstance(error, HTTPError) and error.code < 500 and error.code not in _TRY_AGAIN:
            raise InputError(f"{self.file}: {what}") from None
        if self._failures >= self.retries:
            tries = f" ({self._failures + 1} times in a row, data.retries = {self.retries})" if self.retries else ""
            raise InputError(f"{self.file}: cannot be read: {what}{tries}") from None
        time.sleep(min(WAIT * 2**self._failures, 60.0))
        self._failures += 1

    def _open(self) -> Any:
        if is_remote(self.file):
            return self._ask()
        stream = io.FileIO(self.file)
        stream.seek(self._at)
        return stream

    def _ask(self) -> Any:
        headers = {"Range": f"bytes={self._at}-"} if self._at else {}
        try:
            response: HTTPResponse = urlopen(Request(self.file, headers=headers), timeout=TIMEOUT)
        except HTTPError as error:
            with error:
                if error.code != 416:  # the rest is empty
                    raise
            self._check_size(_total(error.headers.get("Content-Range")))
            return io.BytesIO()
        if response.status == 206:
            self._check_size(_total(response.headers.get("Content-Range")))
            return response
        self._check_size(response.length)
        left = self._at
        while left:
            passed = len(response.read(min(left, 2**20)))
            if not passed:
                raise ConnectionError(f"the connection ended before byte {self._at:,}")
            left -= passed
        return response

    def _check_size(self, size: int | None) -> None:
        known = self._size if self._size is not None else size
        if size is not None and (size != known or size < self._at):
            raise InputError(f"{self.file}: changed while it was read: it has {size:,} bytes now")
        self._size = known


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__


def _total(content_range: str | None) -> int | None:
    """How many bytes all has, as the answer to a request for the rest tells.

    >>> _total("bytes 100-199/200"), _total("bytes */200"), _total("bytes 100-199/*")
    (200, 200, None)
    """
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None
