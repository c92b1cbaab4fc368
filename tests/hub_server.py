"""A small Hugging Face Hub on loopback, for tests: the part of its protocol that pushing and pulling models uses.

    with HubServer(tmp_path) as hub:
        HfApi(endpoint=hub.url, token="hf_alice").create_repo("alice/model")
        hub.fail("lfs_upload", nth=2, status=503)      # the second upload from now on is refused
        hub.calls("lfs_upload")                        # every upload so far, with its status and size

Only a repository's owner writes to it, and anyone reads unless it is private. A kind of call is named after the method
of `HubHandler` that answers it.
"""

import base64
import io
import json
import re
import shutil
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_http import RequestBody, requested_range
from tests.hub_storage import CHUNK, Commit, HubError, Json, Repo, goes_by_lfs

USERS = {"hf_alice": "alice", "hf_bob": "bob"}
"""The tokens that are valid unless the server is given others, and whose they are."""

CUT = 0
"""In place of a status: the connection breaks in the middle of the request's body, or of the reply's without one."""

Access = Literal["anyone", "user", "read", "write"]


class Call(NamedTuple):
    """What the server remembers of a request. `status` is None where the connection broke before the reply."""

    name: str
    method: str
    path: str
    status: int | None
    received: int


class Route(NamedTuple):
    """Which method of `HubHandler` answers what, and who may ask."""

    method: str
    pattern: re.Pattern[str]
    access: Access
    handle: Callable[..., Any]


ROUTES: dict[str, Route] = {}
ROUTE_FIELDS = {
    "kind": r"(?P<kind>models|datasets|spaces)",
    "prefix": r"(?:(?P<kind>datasets|spaces)/)?",
    "repo": r"(?P<repo>\w[\w.-]*/\w[\w.-]*)",
    "revision": r"(?P<revision>[^/]+)",
    "path": r"(?P<path>.+)",
    "oid": r"(?P<oid>[0-9a-f]{64})",
}


def route(method: str, pattern: str, access: Access) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a method of `HubHandler` called with the fields of `pattern`; what it returns is sent as JSON."""

    def register(handle: Callable[..., Any]) -> Callable[..., Any]:
        ROUTES[handle.__name__] = Route(method, re.compile(pattern.format(**ROUTE_FIELDS)), access, handle)
        return handle

    return register


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after the other."""

    server: "HubServer"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self) -> None:
        self.url = urlsplit(self.path)
        self.query = parse_qs(self.url.query)
        self.request_body = RequestBody(self.rfile, self.headers)
        self.body = io.BufferedReader(self.request_body, CHUNK)
        self.call, self.status, self.cut_reply = "unknown", None, False
        try:
            self._serve()
        except ConnectionError:
            self.close_connection = True
            if self.status is None:
                self.log_request(None)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _serve(self) -> None:
        """Every way in which a request can fail ends in the reply that the Hub would give."""
        try:
            handler, fields = self._find_route()
            self._inject_fault()
            result = handler.handle(self, **self._arguments(handler.access, fields))
            if result is not None:
                self._reply_json(200, result)
        except HubError as error:
            self._reply_json(error.status, {"error": str(error)}, error.headers)
        except ConnectionError:
            raise
        except Exception:
            self.server.errors.append(traceback.format_exc())
            self._reply_json(500, {"error": "the test server is at fault: its error is raised when it stops"})

    def _find_route(self) -> tuple[Route, dict[str, str | None]]:
        for name, candidate in ROUTES.items():
            if candidate.method == self.command and (match := candidate.pattern.fullmatch(self.url.path)):
                self.call = name
                return candidate, match.groupdict()
        raise HubError(404, f"{self.command} {self.url.path} is not served by the test server")

    def _inject_fault(self) -> None:
        fault = self.server.next_fault(self.call)
        if fault == CUT and self.request_body.expected:
            self.request_body.read(self.request_body.length // 2 or 1)
            raise ConnectionAbortedError("injected")
        self.cut_reply = fault == CUT
        if fault:
            raise HubError(fault, "injected failure")

    def _arguments(self, access: Access, fields: Mapping[str, str | None]) -> dict[str, Any]:
        values: dict[str, Any] = {name: unquote(value) for name, value in fields.items() if value is not None}
        if "repo" in values:
            values["repo"] = self._repo(values.pop("kind", "models"), values["repo"], access)
        elif access == "user" and self.user is None:
            raise HubError(401, "Invalid username or password.")
        return values

    @property
    def user(self) -> str | None:
        """Who asks: None without a token. A wrong token is refused even where none is needed, as on the Hub."""
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (token := header.removeprefix("Bearer ")) not in self.server.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.server.users[token]

    def _repo(self, kind: str, name: str, access: Access) -> Repo:
        repo = self.server.repos.get((kind, name))
        if repo and access == "anyone":
            return repo
        user = self.user
        if repo is None or (repo.private and user != repo.owner):
            raise HubError(404 if user else 401, f"Repository {name} not found", "RepoNotFound")
        if access == "write" and user != repo.owner:
            raise HubError(403 if user else 401, f"{user or 'a request without a token'} may not write to {name}")
        return repo

    def _reply_json(self, status: int, value: Any, headers: Mapping[str, str] = {}) -> None:
        content = json.dumps(value).encode()
        self._reply(status, {"Content-Type": "application/json", **headers}, io.BytesIO(content), range(len(content)))

    def _reply(self, status: int, headers: Mapping[str, str], file: BinaryIO, part: range) -> None:
        while self.body.read(CHUNK):
            pass  # what a handler left unread would be taken for the next request
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(part))}.items():
            self.send_header(name, value)
        self.end_headers()
        count = len(part) // 2 if self.cut_reply else len(part)
        if count and self.command != "HEAD":
            self.connection.sendfile(file, part.start, count)
        if self.cut_reply:
            raise ConnectionAbortedError("injected")

    def log_request(self, code: Any = None, size: Any = None) -> None:
        self.status = code and int(code)
        self.server.log.append(Call(self.call, self.command, self.path, self.status, self.request_body.received))

    def log_message(self, format: str, *args: Any) -> None:
        """The log is `HubServer.log`: nothing goes to stderr."""

    @route("GET", r"/api/whoami-v2", "user")
    def whoami(self) -> Json:
        token = {"displayName": "test", "role": "write"}
        return {"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}}

    @route("POST", r"/api/validate-yaml", "anyone")
    def validate_yaml(self) -> Json:
        return {"errors": [], "warnings": []}

    @route("POST", r"/api/repos/create", "user")
    def create_repo(self) -> Json | None:
        request = json.load(self.body)
        kind, name = self._named(request)
        if name.split("/")[0] != self.user:
            raise HubError(403, f"{self.user} may not create {name}")
        url = f"{self.server.url}/{'' if kind == 'models' else kind + '/'}{name}"
        if self.server.add_repo(kind, name, is_private(request)):
            return {"url": url}
        return self._reply_json(409, {"error": "You already created this repo", "url": url})

    @route("DELETE", r"/api/repos/delete", "user")
    def delete_repo(self) -> Json:
        self.server.remove_repo(self._repo(*self._named(json.load(self.body)), "write"))
        return {}

    def _named(self, request: Json) -> tuple[str, str]:
        name = f"{request.get('organization') or self.user}/{request['name']}"
        if not re.fullmatch(ROUTE_FIELDS["repo"], name):
            raise HubError(400, f"{name!r} is not a valid repository name")
        return f"{request.get('type') or 'model'}s", name

    @route("PUT", r"/api/{kind}/{repo}/settings", "write")
    def change_settings(self, repo: Repo) -> Json:
        repo.private = is_private(json.load(self.body))
        return {"private": repo.private}

    @route("GET", r"/api/{kind}", "anyone")
    def list_repos(self, kind: str) -> list[Json]:
        author = self.query.get("author", [None])[0]
        repos = (repo for repo in self.server.repos.values() if repo.kind == kind and author in (None, repo.owner))
        return [repo.info(repo.commit_at("main")) for repo in repos if not repo.private or self.user == repo.owner]

    @route("GET", r"/api/{kind}/{repo}(?:/revision/{revision})?", "read")
    def repo_info(self, repo: Repo, revision: str = "main") -> Json:
        return repo.info(repo.commit_at(revision), blobs="blobs" in self.query)

    @route("GET", r"/api/{kind}/{repo}/refs", "read")
    def refs(self, repo: Repo) -> Json:
        refs = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in repo.branches.items()
        ]
        return {"branches": refs, "converts": [], "tags": [], "pullRequests": []}

    @route("POST", r"/api/{kind}/{repo}/branch/{revision}", "write")
    def create_branch(self, repo: Repo, revision: str) -> Json:
        repo.add_branch(revision, json.load(self.body).get("startingPoint", "main"))
        return {}

    @route("GET", r"/api/{kind}/{repo}/commits/{revision}", "read")
    def list_commits(self, repo: Repo, revision: str) -> list[Json]:
        return [
            {"id": commit.oid, "title": commit.title, "message": commit.message, "date": commit.date}
            | {"authors": [{"user": commit.author}]}
            for commit in repo.history(revision)
        ]

    @route("GET", r"/api/{kind}/{repo}/tree/{revision}(?:/{path})?", "read")
    def tree(self, repo: Repo, revision: str, path: str = "") -> list[Json]:
        return repo.commit_at(revision).tree(path, recursive=self.query.get("recursive") == ["true"])

    @route("POST", r"/api/{kind}/{repo}/paths-info/{revision}", "read")
    def paths_info(self, repo: Repo, revision: str) -> list[Json]:
        paths = parse_qs(self.body.read().decode()).get("paths", [])
        entries = repo.commit_at(revision).entries()
        return [entries[path] for path in paths if path in entries]

    @route("POST", r"/api/{kind}/{repo}/preupload/{revision}", "write")
    def preupload(self, repo: Repo, revision: str) -> Json:
        known = {path: file.etag for path, file in repo.commit_at(revision).files.items()}
        files = json.load(self.body)["files"]
        for file in files:
            mode = "lfs" if goes_by_lfs(base64.b64decode(file.pop("sample")), file["size"]) else "regular"
            file.update(uploadMode=mode, shouldIgnore=False, oid=known.get(file["path"]))
        return {"files": files}

    @route("POST", r"/{prefix}{repo}\.git/info/lfs/objects/batch", "write")
    def lfs_batch(self, repo: Repo) -> Json:
        """Say where to send objects; one that is here already gets no address, so that it is not sent again."""
        objects = json.load(self.body)["objects"]
        base = f"{self.server.url}/lfs/{repo.kind}/{repo.name}"
        for item in objects:
            if not repo.content(item["oid"]).exists():
                item["actions"] = {"upload": {"href": f"{base}/{item['oid']}"}, "verify": {"href": f"{base}/verify"}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", r"/lfs/{kind}/{repo}/{oid}", "anyone")
    def lfs_upload(self, repo: Repo, oid: str) -> Json:
        """Take an object. Clients send no token here, since the Hub's own addresses for this are signed."""
        if (received := repo.store(self.body)) != oid:
            raise HubError(400, f"the content sent for object {oid} has the SHA-256 {received}")
        return {}

    @route("POST", r"/lfs/{kind}/{repo}/verify", "write")
    def lfs_verify(self, repo: Repo) -> Json:
        request = json.load(self.body)
        if (size := repo.lfs_object(request["oid"]).size) != request["size"]:
            raise HubError(422, f"object {request['oid']} has {size} bytes, not {request['size']}")
        return {}

    @route("POST", r"/api/{kind}/{repo}/commit/{revision}", "write")
    def commit(self, repo: Repo, revision: str) -> Json:
        if "create_pr" in self.query:
            raise HubError(501, "the test server has no pull requests")
        lines = map(json.loads, self.body)
        header = next(lines)["value"]
        changes = [repo.change(line["key"], line["value"]) for line in lines]
        commit = repo.commit(revision, header, changes, self.user)
        return {"commitOid": commit.oid, "commitUrl": f"{self.server.url}/{repo.name}/commit/{commit.oid}"}

    @route("HEAD", r"/{prefix}{repo}/resolve/{revision}/{path}", "read")
    def metadata(self, repo: Repo, revision: str, path: str) -> None:
        self._reply_file(repo, repo.commit_at(revision), path)

    @route("GET", r"/{prefix}{repo}/resolve/{revision}/{path}", "read")
    def download(self, repo: Repo, revision: str, path: str) -> None:
        self._reply_file(repo, repo.commit_at(revision), path)

    def _reply_file(self, repo: Repo, commit: Commit, path: str) -> None:
        file = commit.file(path)
        part = requested_range(self.headers.get("Range"), file.size)
        headers = {"ETag": f'"{file.etag}"', "X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
        headers |= {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if part:
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{file.size}"
        with repo.content(file.sha256).open("rb") as content:
            self._reply(206 if part else 200, headers, content, part or range(file.size))


def is_private(request: Json) -> bool:
    """Read what clients say of visibility: older ones send `private`, newer ones `visibility`."""
    return request.get("visibility", "private" if request.get("private") else "public") == "private"


class HubServer(ThreadingHTTPServer):
    """The server. In a `with` block it runs, in a thread of its own, at `url`; leaving the block raises its own errors.

    Args:
        folder: where contents are kept.
        users: the valid tokens, and whose they are.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, users: Mapping[str, str] = USERS) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.users = users
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[tuple[str, str], Repo] = {}
        self.log: list[Call] = []
        self.errors: list[str] = []
        self._faults: dict[str, deque[int | None]] = defaultdict(deque)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        assert not self.errors, "\n".join(self.errors)

    def fail(self, name: str, nth: int = 1, times: int = 1, status: int = 500) -> None:
        """Make calls of one kind fail.

        Args:
            name: the method of `HubHandler` that would answer.
            nth: the first call to fail; 1 is the next one from now.
            times: how many fail, one after the other (a client that retries by itself meets the next one).
            status: of the reply, which comes after the whole request was read; or `CUT`.

        Raises:
            ValueError: if there is no such call.
        """
        if name not in ROUTES:
            raise ValueError(f"{name!r} is not a call of the Hub's; the calls are {', '.join(sorted(ROUTES))}")
        with self._lock:
            self._faults[name] = deque([None] * (nth - 1) + [status] * times)

    def next_fault(self, name: str) -> int | None:
        with self._lock:
            return self._faults[name].popleft() if self._faults[name] else None

    def calls(self, name: str) -> list[Call]:
        return [call for call in self.log if call.name == name]

    def add_repo(self, kind: str, name: str, private: bool) -> bool:
        """Create a repository; False if there is one already."""
        with self._lock:
            if (kind, name) in self.repos:
                return False
            self.repos[kind, name] = Repo(kind, name, private, self.folder / kind / name)
            return True

    def remove_repo(self, repo: Repo) -> None:
        with self._lock:
            del self.repos[repo.kind, repo.name]
            shutil.rmtree(repo.folder)
