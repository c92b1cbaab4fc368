"""Two pieces of HTTP that the standard library's server lacks: request bodies as streams, and ranges of bytes."""

import io
import re
from email.message import Message
from typing import Any, BinaryIO

from tests.hub_storage import HubError


class RequestBody(io.RawIOBase):
    """The body of one request, sent whole or in chunks, as a stream that ends where the body ends."""

    def __init__(self, source: BinaryIO, headers: Message) -> None:
        self._source = source
        self._chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
        self._left = self.length = int(headers.get("Content-Length", 0))
        self.expected = self._chunked or self.length > 0
        self.received = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._chunked and not self._left:
            self._open_chunk()
        if not self._left:
            return 0
        count = self._source.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        self.received += count
        if not count:
            raise ConnectionResetError(f"the client went away after {self.received} bytes of a body")
        if self._chunked and not self._left:
            self._source.readline()
        return count

    def _open_chunk(self) -> None:
        self._left = int(self._source.readline().split(b";")[0] or b"0", 16)
        if not self._left:
            self._source.readline()
            self._chunked = False


def requested_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None is the whole file (also for several ranges, as HTTP allows)."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not match or not any(match.groups()):
        return None
    first, last = (int(number) if number else None for number in match.groups())
    start = max(size - last, 0) if first is None else first
    stop = size if first is None or last is None else min(last + 1, size)
    if start >= stop:
        raise HubError(416, f"{header} lies outside of {size} bytes", Content_Range=f"bytes */{size}")
    return range(start, stop)
