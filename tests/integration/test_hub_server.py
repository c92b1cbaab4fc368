"""The Hub of the tests, proved with the real client, huggingface_hub.

Functions without `test_` in their names run in client processes, and import there what they need.
"""

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hub_client import HubClient
from tests.hub_server import CUT, HubServer

REPO = "alice/model"
OUT_OF_SPACE = 507
"""A status at which huggingface_hub gives up; 500 and 503 it retries by itself while it uploads."""
SUCCESS = [None, None, ""]
"""What `failure` returns of an action that succeeds."""


def write_weights(folder: Path, **sizes: int) -> dict[str, str]:
    """Fill a folder with binary files, which go by LFS, and return the SHA-256 of each."""
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        (folder / f"{name}.bin").write_bytes(b"\0" + os.urandom(size - 1))
    return sha256_of_files(folder)


def sha256_of_files(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def objects(hub: HubServer, status: int | None = 200) -> set[str]:
    """SHA-256 of the objects whose upload ended with `status`."""
    return {call.path.split("/")[-1] for call in hub.calls("lfs_upload") if call.status == status}


def failure(action: Callable[[], Any]) -> list[Any]:
    """Name of the error that `action` raises, the HTTP status in it, and its message."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, getattr(getattr(error, "response", None), "status_code", None), str(error)]
    return SUCCESS


def push(folder: str, repo: str = REPO, revision: str | None = None) -> list[Any]:
    """Upload a folder; the result is that of `failure`."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo, exist_ok=True)
    return failure(lambda: HfApi().upload_folder(repo_id=repo, folder_path=folder, revision=revision))


def pull(repo: str = REPO, revision: str | None = None) -> dict[str, str]:
    """Download a repository whole, and return the SHA-256 of its files other than `.gitattributes`."""
    from huggingface_hub import snapshot_download

    files = sha256_of_files(Path(snapshot_download(repo, revision=revision)))
    return {path: sha256 for path, sha256 in files.items() if path != ".gitattributes"}


def push_and_pull(folder: str) -> tuple[list[Any], dict[str, str]]:
    return push(folder), pull()


def push_and_pull_twice(folder: str) -> tuple[list[Any], dict[str, str]]:
    """Older clients raise when a connection breaks, newer ones try again by themselves: in the end both have it all."""
    push(folder)
    failure(pull)
    return push_and_pull(folder)


def live(folder: str) -> dict[str, Any]:
    """Create a repository, push to it, look at it from all sides, delete from it and delete it."""
    from huggingface_hub import HfApi

    api = HfApi()
    seen: dict[str, Any] = {"whoami": api.whoami()["name"]}
    seen["urls"] = [str(api.create_repo(REPO, exist_ok=exist_ok)) for exist_ok in (False, True)]
    seen["created twice"] = failure(lambda: api.create_repo(REPO))[:2]
    api.upload_file(repo_id=REPO, path_or_fileobj=b"# Title", path_in_repo="README.md", commit_message="Add the card")
    pushes = [api.upload_folder(repo_id=REPO, folder_path=folder, path_in_repo="weights/first") for _ in range(2)]
    seen["pushes"] = [push.oid for push in pushes]
    seen["commits"] = [[commit.title, commit.authors] for commit in api.list_repo_commits(REPO)]
    seen["root"] = {entry.path: type(entry).__name__ for entry in api.list_repo_tree(REPO)}
    seen["below"] = [entry.path for entry in api.list_repo_tree(REPO, "weights/first")]
    seen["all"] = [entry.path for entry in api.list_repo_tree(REPO, recursive=True)]
    card, weights = api.get_paths_info(REPO, ["README.md", "absent", "weights/first/model.bin"])
    seen["card"] = [card.size, card.blob_id, card.lfs]
    seen["weights"] = [weights.size, weights.lfs.sha256, weights.lfs.size]
    siblings = {file.rfilename: file for file in api.model_info(REPO, files_metadata=True).siblings}
    seen["siblings"] = [siblings["README.md"].blob_id, siblings["weights/first/model.bin"].lfs.sha256]
    seen["listed"] = [[model.id for model in api.list_models(author=author)] for author in ("alice", "bob")]
    seen["absent file"] = failure(lambda: api.hf_hub_download(REPO, "absent"))[:2]
    seen["absent folder"] = failure(lambda: list(api.list_repo_tree(REPO, "absent")))[:2]
    seen["absent revision"] = failure(lambda: api.hf_hub_download(REPO, "README.md", revision="absent"))[:2]
    seen["absent repository"] = failure(lambda: api.model_info("alice/absent"))[:2]
    api.delete_file("README.md", REPO)
    api.delete_folder("weights", REPO)
    seen["left"] = api.list_repo_files(REPO)
    seen["deleted twice"] = failure(lambda: api.delete_file("README.md", REPO))[:2]
    seen["before"] = api.list_repo_files(REPO, revision=pushes[0].oid)
    api.delete_repo(REPO)
    seen["deleted repository"] = failure(lambda: api.model_info(REPO))[:2]
    return seen


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a client saw in `live`, and the hash of the weights that it pushed."""
    folder = tmp_path_factory.mktemp("life")
    weights = write_weights(folder / "push", model=5000)
    (folder / "push/config.json").write_text("{}")
    with HubServer(folder / "hub") as hub:
        seen = HubClient(hub, folder / "client")(live, folder / "push")
    return seen | {"url": hub.url, "sha256": weights["model.bin"]}


def test_whoami_names_the_user_of_the_token(life: dict[str, Any]):
    assert life["whoami"] == "alice"


def test_creating_again_conflicts_or_gives_the_same_url(life: dict[str, Any]):
    assert life["urls"] == [f"{life['url']}/{REPO}"] * 2
    assert life["created twice"] == ["HfHubHTTPError", 409]


def test_pushing_what_is_there_already_makes_no_commit(life: dict[str, Any]):
    assert life["pushes"][0] == life["pushes"][1]
    titles = ["Upload folder using huggingface_hub", "Add the card", "initial commit"]
    assert life["commits"] == [[title, ["alice"]] for title in titles]


def test_tree_lists_one_level_or_all(life: dict[str, Any]):
    assert life["root"] == {"weights": "RepoFolder", ".gitattributes": "RepoFile", "README.md": "RepoFile"}
    files = ["weights/first/config.json", "weights/first/model.bin"]
    assert life["below"] == files
    assert life["all"] == ["weights", "weights/first", ".gitattributes", "README.md", *files]


def test_paths_info_and_siblings_tell_lfs_files_from_regular_ones(life: dict[str, Any]):
    blob_id = hashlib.sha1(b"blob 7\0# Title").hexdigest()
    assert life["card"] == [7, blob_id, None]
    assert life["weights"] == [5000, life["sha256"], 5000]
    assert life["siblings"] == [blob_id, life["sha256"]]


def test_models_are_listed_by_author(life: dict[str, Any]):
    assert life["listed"] == [[REPO], []]


def test_what_does_not_exist_is_told_apart(life: dict[str, Any]):
    assert life["absent file"] == ["RemoteEntryNotFoundError", 404]
    assert life["absent folder"] == ["RemoteEntryNotFoundError", 404]
    assert life["absent revision"] == ["RevisionNotFoundError", 404]
    assert life["absent repository"] == ["RepositoryNotFoundError", 404]


def test_deleted_files_stay_in_earlier_revisions(life: dict[str, Any]):
    assert life["left"] == [".gitattributes"]
    assert life["deleted twice"] == ["RemoteEntryNotFoundError", 404]
    assert "weights/first/model.bin" in life["before"] and "README.md" in life["before"]


def test_a_deleted_repository_is_gone(life: dict[str, Any]):
    assert life["deleted repository"] == ["RepositoryNotFoundError", 404]


def push_to_branches(first: str, second: str) -> dict[str, Any]:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    api.create_repo(REPO)
    start = api.model_info(REPO).sha
    seen: dict[str, Any] = {"unknown branch": push(first, revision="v1.0/beta")[:2]}
    api.create_branch(REPO, branch="v1.0/beta")
    api.create_branch(REPO, branch="v1.0/beta", exist_ok=True)
    seen["created twice"] = failure(lambda: api.create_branch(REPO, branch="v1.0/beta"))[:2]
    seen["pushed"] = [push(first, revision="v1.0/beta"), push(second)]
    seen["branches"] = sorted(branch.name for branch in api.list_repo_refs(REPO).branches)
    change = CommitOperationAdd("late.txt", b"late")
    seen["stale parent"] = failure(
        lambda: api.create_commit(REPO, [change], commit_message="Late", parent_commit=start)
    )[:2]
    seen["pulled"] = [pull(revision="v1.0/beta"), pull()]
    return seen


def test_branches_take_pushes_of_their_own_and_refuse_a_stale_parent(run_client: HubClient, tmp_path: Path):
    first, second = write_weights(tmp_path / "first", a=1000, b=1000), write_weights(tmp_path / "second", b=2000)
    seen = run_client(push_to_branches, tmp_path / "first", tmp_path / "second")
    assert seen["unknown branch"] == ["RevisionNotFoundError", 404]
    assert seen["created twice"] == ["HfHubHTTPError", 409]
    assert seen["pushed"] == [SUCCESS] * 2
    assert seen["branches"] == ["main", "v1.0/beta"]
    assert seen["pulled"] == [first, second]
    assert seen["stale parent"] == ["HfHubHTTPError", 412]


def share() -> dict[str, Any]:
    """Have alice's repository approached by others while it is private, and again when it is public."""
    from huggingface_hub import HfApi

    alice, bob, nobody = HfApi(), HfApi(token="hf_bob"), HfApi(token=False)

    def approach(api: HfApi) -> dict[str, Any]:
        return {
            "info": failure(lambda: api.model_info(REPO))[:2],
            "read": failure(lambda: api.hf_hub_download(REPO, "a.txt", cache_dir=f"cache-{api.token}"))[:2],
            "write": failure(lambda: api.upload_file(repo_id=REPO, path_or_fileobj=b"b", path_in_repo="b.txt"))[:2],
            "listed": [model.id for model in api.list_models()],
        }

    alice.create_repo(REPO, private=True)
    seen: dict[str, Any] = {"private": alice.model_info(REPO).private}
    alice.upload_file(repo_id=REPO, path_or_fileobj=b"a", path_in_repo="a.txt")
    seen["while private"] = [approach(alice), approach(bob), approach(nobody)]
    alice.update_repo_settings(REPO, private=False)
    seen["when public"] = [approach(bob), approach(nobody)]
    seen["create for alice"] = [failure(partial(api.create_repo, "alice/other"))[:2] for api in (bob, nobody)]
    return seen


def test_only_the_owner_writes_and_sees_what_is_private(run_client: HubClient):
    seen = run_client(share)
    assert seen["private"] is True
    alice, *others = seen["while private"]
    assert alice["info"] == alice["read"] == alice["write"] == [None, None] and alice["listed"] == [REPO]
    for other, status in zip(others, (404, 401), strict=True):
        assert other["info"] == other["read"] == other["write"] == ["RepositoryNotFoundError", status]
        assert other["listed"] == []
    for other, status in zip(seen["when public"], (403, 401), strict=True):
        assert other["info"] == other["read"] == [None, None] and other["listed"] == [REPO]
        assert other["write"] == ["HfHubHTTPError", status]
    assert seen["create for alice"] == [["HfHubHTTPError", 403], ["HfHubHTTPError", 401]]


def use_wrong_token() -> list[list[Any]]:
    from huggingface_hub import HfApi

    api = HfApi()
    HfApi(token="hf_alice").create_repo(REPO)
    return [
        failure(api.whoami),
        failure(lambda: api.create_repo("alice/other")),
        failure(lambda: api.model_info(REPO)),
    ]


def test_a_wrong_token_is_refused_even_where_none_is_needed(hub: HubServer, run_client: HubClient):
    whoami, create, read = run_client(use_wrong_token, token="hf_wrong")
    assert whoami[:2] == create[:2] == read[:2] == ["HfHubHTTPError", 401]
    assert "Invalid user token" in whoami[2]
    assert list(hub.repos) == [("models", REPO)]


def push_dataset(folder: str) -> dict[str, str]:
    from huggingface_hub import HfApi, snapshot_download

    HfApi().create_repo("alice/data", repo_type="dataset")
    HfApi().upload_folder(repo_id="alice/data", repo_type="dataset", folder_path=folder)
    return sha256_of_files(Path(snapshot_download("alice/data", repo_type="dataset")))


def test_datasets_are_repositories_of_their_own_kind(hub: HubServer, run_client: HubClient, tmp_path: Path):
    weights = write_weights(tmp_path / "push", model=1000)
    (tmp_path / "push/data.txt").write_text("text\n" * 10)
    assert run_client(push_dataset, tmp_path / "push").items() >= weights.items()
    assert list(hub.repos) == [("datasets", "alice/data")]


@pytest.mark.parametrize("status", [503, CUT], ids=["refused", "cut"])
def test_an_upload_that_failed_once_is_sent_again(hub: HubServer, run_client: HubClient, tmp_path: Path, status: int):
    weights = write_weights(tmp_path / "push", a=300_000, b=300_000)
    hub.fail("lfs_upload", nth=2, status=status)
    assert run_client(push_and_pull_twice, tmp_path / "push") == [SUCCESS, weights]
    assert len(hub.calls("lfs_upload")) == 3 and len(objects(hub, status or None)) == 1


def test_a_push_that_failed_in_an_upload_leaves_no_commit_and_resumes_with_what_is_missing(
    hub: HubServer, run_client: HubClient, tmp_path: Path
):
    weights = write_weights(tmp_path / "push", a=3000, b=3000, c=3000, d=3000)
    hub.fail("lfs_upload", nth=2, status=OUT_OF_SPACE)
    (error, _, message), pulled = run_client(push_and_pull, tmp_path / "push")
    assert error == "RuntimeError" and "Error while uploading" in message
    assert pulled == {} and not hub.calls("commit")
    # The client uploads in parallel and may give up before all of the others were sent.
    refused, sent = objects(hub, OUT_OF_SPACE), objects(hub)
    assert len(refused) == 1 and refused.isdisjoint(sent)

    hub.log.clear()
    assert run_client(push_and_pull, tmp_path / "push") == [SUCCESS, weights]
    missing = set(weights.values()) - sent
    assert objects(hub) == missing and len(hub.calls("lfs_upload")) == len(missing)


def test_a_push_that_failed_in_its_commit_resumes_without_sending_anything_again(
    hub: HubServer, run_client: HubClient, tmp_path: Path
):
    weights = write_weights(tmp_path / "push", a=3000, b=3000)
    hub.fail("commit", status=500)
    failed, pulled = run_client(push_and_pull, tmp_path / "push")
    assert failed[:2] == ["HfHubHTTPError", 500] and pulled == {}

    hub.log.clear()
    assert run_client(push_and_pull, tmp_path / "push") == [SUCCESS, weights]
    assert len(hub.calls("commit")) == 1 and not hub.calls("lfs_upload")


def test_a_broken_download_resumes_where_it_stopped(hub: HubServer, run_client: HubClient, tmp_path: Path):
    # The client writes 10 MiB at a time, and forgets what it has of a piece when the connection breaks.
    weights = write_weights(tmp_path / "push", model=24 << 20)
    hub.fail("download", times=2, status=CUT)
    assert run_client(push_and_pull_twice, tmp_path / "push") == [SUCCESS, weights]
    assert [call.status for call in hub.calls("download") if call.path.endswith("model.bin")] == [200, 206]


def test_memory_does_not_grow_with_the_size_of_files(hub: HubServer, run_client: HubClient, tmp_path: Path):
    size = 64 << 20
    (tmp_path / "push").mkdir()
    with (tmp_path / "push/model.bin").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    pushed, pulled = run_client(push_and_pull, tmp_path / "push")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pushed == SUCCESS and pulled == sha256_of_files(tmp_path / "push")
    assert peak < size / 8
