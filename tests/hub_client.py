"""Processes in which Hugging Face libraries take a test server for the Hub."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hub_server import HubServer

ROOT = Path(__file__).parents[1]
CALL_FUNCTION = """
import json, pathlib, runpy, sys
module, name, arguments, result = sys.argv[1:]
value = runpy.run_path(module)[name](*json.loads(arguments))
pathlib.Path(result).write_text(json.dumps(value))
"""


@dataclass(frozen=True)
class HubClient:
    """Calls functions in processes of their own, which know no Hub but `hub`.

    The libraries read where the Hub is when they are imported, and the tests' own process runs with the Hub off.

    Args:
        hub: a running server.
        folder: the current folder of the processes, and where each user's cache of the Hub is.
    """

    hub: HubServer
    folder: Path

    def __call__(self, function: Callable[..., Any], *arguments: Any, token: str | None = "hf_alice") -> Any:
        """Return what `function(*arguments)` returns, called in a new process.

        Args:
            function: a function at the top level of a file. The file is run again in every process, so it had better
                import slow libraries inside of its functions. The result travels as JSON.
            arguments: travel as JSON, paths as strings.
            token: whose token the client has; None for none.

        Raises:
            AssertionError: if the function raises, with everything that it printed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        result = self.folder / f"{function.__name__}.json"
        command = [sys.executable, "-c", CALL_FUNCTION, function.__code__.co_filename, function.__name__]
        command += [json.dumps(arguments, default=os.fspath), str(result)]
        environment = self._environment(token)
        process = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True)
        assert process.returncode == 0, f"{function.__name__} failed:\n{process.stdout}{process.stderr}"
        return json.loads(result.read_text())

    def _environment(self, token: str | None) -> dict[str, str]:
        own = ("HF_", "TRANSFORMERS_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        settings = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / f"home-{token}"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        return inherited | settings | ({"HF_TOKEN": token} if token else {})
