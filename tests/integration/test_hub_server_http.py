"""The Hub of the tests, request by request: what well-behaved clients never send, or never show."""

import hashlib
import http.client
import json
import os
import time
from typing import Any

import pytest

from tests.hub_server import HubServer

REPO = "alice/model"


def test_a_failure_of_an_unknown_call_is_refused(hub: HubServer):
    with pytest.raises(ValueError, match=r"'upload' is not a call of the Hub's; the calls are .*lfs_upload"):
        hub.fail("upload")


def request(hub: HubServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, bytes]:
    """One request by hand, as alice: status, headers and body of the reply."""
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))
    headers = {"Authorization": "Bearer hf_alice", **headers}
    connection.request(method, path, body, headers, encode_chunked="Transfer-Encoding" in headers)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, reply.headers, content


@pytest.fixture
def thousand_bytes(hub: HubServer) -> bytes:
    """The content of an object that was uploaded, in two chunks, and committed as `model.bin`."""
    content = os.urandom(1000)
    oid = hashlib.sha256(content).hexdigest()
    request(hub, "POST", "/api/repos/create", json.dumps({"name": "model"}))
    chunks = iter([content[:10], content[10:]])
    assert request(hub, "PUT", f"/lfs/models/{REPO}/{oid}", chunks, **{"Transfer-Encoding": "chunked"})[0] == 200
    assert commit(hub, {"key": "lfsFile", "value": {"path": "model.bin", "algo": "sha256", "oid": oid}}) == 200
    return content


def commit(hub: HubServer, *operations: dict[str, Any]) -> int:
    header = {"key": "header", "value": {"summary": "Change", "description": ""}}
    lines = "".join(json.dumps(item) + "\n" for item in (header, *operations))
    return request(hub, "POST", f"/api/models/{REPO}/commit/main", lines)[0]


@pytest.mark.parametrize(
    ("asked", "part"),
    [("0-9", slice(0, 10)), ("990-2000", slice(990, 1000)), ("400-", slice(400, 1000)), ("-1", slice(999, 1000))],
)
def test_ranges_are_served_as_parts(hub: HubServer, thousand_bytes: bytes, asked: str, part: slice):
    status, headers, content = request(hub, "GET", f"/{REPO}/resolve/main/model.bin", Range=f"bytes={asked}")
    assert (status, content) == (206, thousand_bytes[part])
    assert headers["Content-Range"] == f"bytes {part.start}-{part.stop - 1}/1000"


def test_a_range_outside_of_the_file_is_refused(hub: HubServer, thousand_bytes: bytes):
    status, headers, _ = request(hub, "GET", f"/{REPO}/resolve/main/model.bin", Range="bytes=1000-")
    assert (status, headers["Content-Range"]) == (416, "bytes */1000")


def test_head_gives_what_get_gives_without_the_content(hub: HubServer, thousand_bytes: bytes):
    status, headers, content = request(hub, "HEAD", f"/{REPO}/resolve/main/model.bin")
    assert (status, content, headers["Content-Length"], headers["X-Linked-Size"]) == (200, b"", "1000", "1000")
    assert headers["ETag"] == headers["X-Linked-Etag"] == f'"{hashlib.sha256(thousand_bytes).hexdigest()}"'
    assert headers["X-Repo-Commit"] == hub.repos["models", REPO].branches["main"]
    got = request(hub, "GET", f"/{REPO}/resolve/main/model.bin")
    assert got[0] == 200 and got[2] == thousand_bytes
    assert {name: got[1][name] for name in headers if name != "Date"} == {
        name: headers[name] for name in headers if name != "Date"
    }


def test_content_that_does_not_fit_its_hash_is_refused(hub: HubServer, thousand_bytes: bytes):
    wrong = "0" * 64
    assert request(hub, "PUT", f"/lfs/models/{REPO}/{wrong}", b"content")[0] == 400
    assert commit(hub, {"key": "lfsFile", "value": {"path": "other.bin", "algo": "sha256", "oid": wrong}}) == 400


def test_a_commit_is_made_whole_or_not_at_all(hub: HubServer, thousand_bytes: bytes):
    before = dict(hub.repos["models", REPO].branches)
    write = {"key": "file", "value": {"path": "a.txt", "content": "YQ==", "encoding": "base64"}}
    assert commit(hub, write, {"key": "deletedFile", "value": {"path": "absent"}}) == 404
    assert commit(hub, write, {"key": "renamedFile", "value": {"path": "model.bin"}}) == 400
    assert hub.repos["models", REPO].branches == before


def test_an_interrupted_upload_leaves_nothing_behind(hub: HubServer, thousand_bytes: bytes):
    folder = hub.repos["models", REPO].folder
    before, calls = set(folder.rglob("*")), len(hub.calls("lfs_upload"))
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))
    connection.putrequest("PUT", f"/lfs/models/{REPO}/{'0' * 64}")
    connection.putheader("Content-Length", "100000")
    connection.endheaders(b"x" * 50_000)
    connection.close()
    deadline = time.monotonic() + 10
    while len(hub.calls("lfs_upload")) == calls and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hub.calls("lfs_upload")[-1].status is None
    assert set(folder.rglob("*")) == before
