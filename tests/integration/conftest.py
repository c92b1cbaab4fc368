"""Fixtures of whole flows: a Hub on loopback, and clients of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_client import HubClient
from tests.hub_server import HubServer


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A running Hub without repositories."""
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run_client(hub: HubServer, tmp_path: Path) -> HubClient:
    """`run_client(function, *arguments)` calls a function where `hub` is the Hub: see `HubClient`."""
    return HubClient(hub, tmp_path / "client")
