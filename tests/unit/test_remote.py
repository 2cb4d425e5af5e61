"""Files by HTTP, from a server on this machine that drops connections, sleeps, fails and does not know ranges."""

from __future__ import annotations

import errno
import gzip
import io
import json
import lzma
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from t2t.config import Data
from t2t.data import remote
from t2t.data.blocks import blocks
from t2t.data.remote import Patient
from t2t.data.sources import Reader
from t2t.data.stream import Cursor, Member, Source
from t2t.data.tokens import Bytes
from t2t.errors import InputError

LINES = "".join(json.dumps({"s": f"source {i}", "t": f"{i}" * 9}) + "\n" for i in range(20000)).encode()


class Server:
    """Serves ``content``, after what ``trouble`` has for each request in turn; keeps the ranges asked for."""

    def __init__(self) -> None:
        self.content = LINES
        self.ranges = True  # whether they are known
        self.trouble: list[Any] = []  # an HTTP status, bytes to send before the connection ends, or "sleep"
        self.asked: list[str | None] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        trouble = self.trouble.pop(0) if self.trouble else None
        if trouble == "sleep":
            time.sleep(0.6)
        if isinstance(trouble, int) and 400 <= trouble < 600:
            handler.send_error(trouble)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        size = len(self.content)
        if start and start >= size:
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{size}")
            handler.end_headers()
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        handler.send_header("Content-Length", str(size - start))
        handler.end_headers()
        rest = self.content[start:]
        handler.wfile.write(rest[:trouble] if isinstance(trouble, int) else rest)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/{name}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(remote, "WAIT", 0.01)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def whole(url: str, retries: int = 0) -> bytes:
    with io.BufferedReader(Patient(url, retries), 2**17) as stream:
        return stream.read()


@pytest.mark.parametrize("ranges", [True, False])
def test_reading_goes_on_where_it_failed(server: Server, ranges: bool) -> None:
    server.ranges = ranges
    server.trouble = [1000, 500, 200_000, "sleep", 300_000]
    assert whole(server.url("a.jsonl"), retries=2) == LINES
    assert server.asked[0] is None and server.asked[1] == "bytes=1000-"
    assert len(server.asked) == 6


def test_failures_in_a_row_are_counted_and_then_named(server: Server) -> None:
    server.trouble = [1000, 503, 1000, 503, 503]
    message = r"a.jsonl: cannot be read: HTTP Error 503: .* \(3 times in a row, data.retries = 2\)"
    with pytest.raises(InputError, match=message):
        whole(server.url("a.jsonl"), retries=2)
    assert len(server.asked) == 5


def test_a_server_that_sleeps_counts_as_failed(server: Server) -> None:
    server.trouble = ["sleep"]
    with pytest.raises(InputError, match=r"a.jsonl: cannot be read: timed out"):
        whole(server.url("a.jsonl"))


def test_an_answer_is_not_asked_for_again(server: Server) -> None:
    server.trouble = [404]
    with pytest.raises(InputError, match="a.jsonl: HTTP Error 404: Not Found"):
        whole(server.url("a.jsonl"), retries=5)
    assert len(server.asked) == 1


def test_a_server_that_is_gone_is_named(server: Server) -> None:
    url = server.url("a.jsonl")
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(InputError, match=r"a.jsonl: cannot be read: .*refused \(3 times in a row, data.retries = 2\)"):
        whole(url, retries=2)


def test_a_file_that_changes_meanwhile_is_refused(server: Server) -> None:
    server.trouble = [1000]
    with pytest.raises(InputError, match="changed while it was read: it has 500,000 bytes now"):
        stream = Patient(server.url("a.jsonl"), retries=2)
        stream.read(1000)
        server.content = LINES[:500_000]
        stream.read(1000)


@pytest.mark.parametrize("compression", ["", ".gz", ".xz"])
def test_addresses_are_read_like_files(server: Server, compression: str) -> None:
    pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
    server.content = pack[compression](LINES)
    url = server.url(f"a.jsonl{compression}?token=1.2")
    server.trouble = [len(server.content) // 3]
    assert [record.fields["s"] for record in Reader([url], retries=1)] == [f"source {i}" for i in range(20000)]
    found = list(blocks(url, records=5000))
    again = list(blocks(url, records=5000, start=found[1].end))
    assert again == found[2:]
    server.content = server.content[:-9]
    if compression:
        server.asked.clear()
        with pytest.raises(InputError, match="cut or broken after line"):
            list(blocks(url, retries=5))
        assert len(server.asked) == 1  # bad data is not asked for again


def test_parquet_by_address(server: Server) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    sink = io.BytesIO()
    write_table(pyarrow.table({"s": ["a", "b"], "t": ["c", "d"]}), sink)
    server.content = sink.getvalue()
    assert [record.fields["s"] for record in Reader([server.url("a.parquet")])] == ["a", "b"]


def test_a_stream_goes_on_by_the_rest_alone(server: Server) -> None:
    data = Data(train=(server.url("a.jsonl"),), shuffle=1000, max_source_length=32, max_target_length=32)
    source = Source(data, Bytes(), 1, "seq2seq", 0)
    member = Member(source, 0, 2, Cursor())
    member.take(2500)
    server.asked.clear()
    resumed = Member(source, 0, 2, member.cursor)
    server.trouble = [2000, 500]
    assert resumed.take(7000)[0] == member.take(7000)[0]
    start = sum(map(len, LINES.splitlines(keepends=True)[:4000]))  # of the third block of two members' 1,000 lines
    assert server.asked[:2] == [f"bytes={start}-", f"bytes={start + 2000}-"]


def test_a_file_that_fails_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr(remote, "WAIT", 0.001)
    failures = [0]

    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            if failures[0] > 0 and self.tell() > 0:
                failures[0] -= 1
                raise OSError(errno.EIO, "Input/output error")
            return super().readinto(buffer)

    monkeypatch.setattr(remote.io, "FileIO", Failing)
    expected = [block.lines for block in blocks(str(tmp_path / "a.txt.gz"))]
    failures[0] = 3
    assert [block.lines for block in blocks(str(tmp_path / "a.txt.gz"), retries=3)] == expected
    failures[0] = 4
    with pytest.raises(InputError, match=r"a.txt.gz: cannot be read: Input/output error \(4 times in a row"):
        list(blocks(str(tmp_path / "a.txt.gz"), retries=3))
