"""What the Hub of the tests keeps: repositories with their branches and commits, and the contents of their files.

Contents lie on disk, named by their SHA-256, and are streamed there, so that memory does not grow with their size;
branches, commits and lists of files are kept in memory. Rules and errors are the Hub's.
"""

import base64
import hashlib
import io
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

CHUNK = 1 << 20
MAX_REGULAR_SIZE = 10 << 20
GITATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n*.safetensors filter=lfs diff=lfs merge=lfs -text\n"

Json = dict[str, Any]


class HubError(Exception):
    """A refusal as the client sees it: status, message, the Hub's error code, further headers (`_` stands for `-`)."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.headers |= {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def goes_by_lfs(sample: bytes, size: int) -> bool:
    """Whether a file that begins with `sample` is kept outside of git: it is binary, or big."""
    return b"\0" in sample or size > MAX_REGULAR_SIZE


@dataclass(frozen=True)
class File:
    """A file of a commit. For LFS files `blob_id` is that of the pointer, the text which git keeps in their place."""

    size: int
    sha256: str
    blob_id: str
    pointer_size: int = 0

    @classmethod
    def lfs(cls, sha256: str, size: int) -> Self:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return cls(size, sha256, git_blob_id(pointer), len(pointer))

    @property
    def etag(self) -> str:
        """What tells a client whether the content has changed."""
        return self.sha256 if self.pointer_size else self.blob_id

    def tree_entry(self, path: str) -> Json:
        entry = {"type": "file", "path": path, "oid": self.blob_id, "size": self.size}
        return entry | self._lfs_entry("oid")

    def sibling(self, path: str) -> Json:
        return {"rfilename": path, "blobId": self.blob_id, "size": self.size} | self._lfs_entry("sha256")

    def _lfs_entry(self, name: str) -> Json:
        lfs = {name: self.sha256, "size": self.size, "pointerSize": self.pointer_size}
        return {"lfs": lfs} if self.pointer_size else {}


@dataclass(frozen=True)
class Commit:
    """One state of a repository: all its files by path, and how it came about."""

    parent: str | None
    files: Mapping[str, File]
    title: str
    message: str
    author: str
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))

    @property
    def oid(self) -> str:
        return hashlib.sha1(repr(self).encode()).hexdigest()

    def file(self, path: str) -> File:
        if path not in self.files:
            raise self._no_entry(path)
        return self.files[path]

    def _no_entry(self, path: str) -> HubError:
        return HubError(404, f"{path!r} does not exist", "EntryNotFound", X_Repo_Commit=self.oid)

    def entries(self) -> dict[str, Json]:
        """Every folder and every file by its path, as the Hub describes them."""
        folders = {str(folder) for path in self.files for folder in Path(path).parents} - {"."}
        entries = {path: self._folder_entry(path) for path in sorted(folders)}
        return entries | {path: file.tree_entry(path) for path, file in sorted(self.files.items())}

    def _folder_entry(self, folder: str) -> Json:
        inside = sorted((path, file.sha256) for path, file in self.files.items() if path.startswith(f"{folder}/"))
        return {"type": "directory", "path": folder, "oid": hashlib.sha1(repr(inside).encode()).hexdigest()}

    def tree(self, folder: str, recursive: bool) -> list[Json]:
        """What lies in `folder` ("" is the root)."""
        entries = self.entries()
        if folder and entries.get(folder, {}).get("type") != "directory":
            raise self._no_entry(folder)
        start = f"{folder}/" if folder else ""
        inside = {path: entry for path, entry in entries.items() if path.startswith(start)}
        return [entry for path, entry in inside.items() if recursive or "/" not in path.removeprefix(start)]


class Change(NamedTuple):
    """One operation of a commit: a file to write, or a path to delete."""

    kind: str
    path: str
    file: File | None = None

    def apply(self, files: dict[str, File]) -> None:
        if self.file:
            files[self.path] = self.file
            return
        prefix = self.path.rstrip("/") + "/" if self.kind == "deletedFolder" else None
        gone = [path for path in files if path == self.path or (prefix and path.startswith(prefix))]
        if not gone:
            raise HubError(404, f"{self.path!r}: A file with this name doesn't exist", "EntryNotFound")
        for path in gone:
            del files[path]


@dataclass
class Repo:
    """A repository of `kind` models, datasets or spaces; it belongs to the user whose name comes first in `name`."""

    kind: str
    name: str
    private: bool
    folder: Path
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        first = {".gitattributes": self._regular(GITATTRIBUTES)}
        self._add("main", Commit(None, first, "initial commit", "", self.owner))

    @property
    def owner(self) -> str:
        return self.name.split("/")[0]

    def info(self, commit: Commit, blobs: bool = False) -> Json:
        siblings = [file.sibling(path) if blobs else {"rfilename": path} for path, file in commit.files.items()]
        about = {"id": self.name, "author": self.owner, "private": self.private, "gated": False, "disabled": False}
        return about | {"sha": commit.oid, "lastModified": commit.date, "tags": [], "siblings": siblings}

    def commit_at(self, revision: str) -> Commit:
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, revision: str) -> list[Commit]:
        """The commits that lead to a revision, newest first."""
        commits = [self.commit_at(revision)]
        while parent := commits[-1].parent:
            commits.append(self.commits[parent])
        return commits

    def add_branch(self, name: str, start: str) -> None:
        with self.lock:
            if name in self.branches:
                raise HubError(409, f"Reference already exists: {name}")
            self.branches[name] = self.commit_at(start).oid

    def commit(self, branch: str, header: Json, changes: Iterable[Change], author: str) -> Commit:
        """Add one commit to `branch`: all of its changes, or none if one of them can't be made."""
        with self.lock:
            parent = self.commit_at(branch)
            if branch not in self.branches:
                raise HubError(400, f"{branch} is not a branch: only branches take commits")
            if header.get("parentCommit", parent.oid) != parent.oid:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = dict(parent.files)
            for change in changes:
                change.apply(files)
            return self._add(branch, Commit(parent.oid, files, header["summary"], header["description"], author))

    def _add(self, branch: str, commit: Commit) -> Commit:
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def change(self, kind: str, value: Json) -> Change:
        """Read one operation of a commit, and store the content that it carries."""
        if kind == "file":
            return Change(kind, value["path"], self._regular(base64.b64decode(value["content"])))
        if kind == "lfsFile":
            return Change(kind, value["path"], self.lfs_object(value["oid"]))
        if kind in ("deletedFile", "deletedFolder"):
            return Change(kind, value["path"])
        raise HubError(400, f"unknown operation {kind!r} in a commit")

    def _regular(self, content: bytes) -> File:
        return File(len(content), self.store(io.BytesIO(content)), git_blob_id(content))

    def lfs_object(self, sha256: str) -> File:
        if not self.content(sha256).exists():
            raise HubError(400, f"LFS object {sha256} was not uploaded")
        return File.lfs(sha256, self.content(sha256).stat().st_size)

    def content(self, sha256: str) -> Path:
        return self.folder / sha256

    def store(self, body: BinaryIO) -> str:
        """Stream a content to disk and return its SHA-256. It appears there once it is whole, not before."""
        digest = hashlib.sha256()
        with tempfile.TemporaryDirectory(dir=self.folder) as aside:
            with Path(aside, "content").open("wb") as file:
                while chunk := body.read(CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
            os.replace(file.name, self.content(digest.hexdigest()))
        return digest.hexdigest()
