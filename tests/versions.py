"""Tests of what works only above the lowest versions that `pyproject.toml` promises."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, lowest: str, because: str) -> pytest.MarkDecorator:
    """Skip a test below a version of a package, and say what that package cannot do there."""
    installed = version(package)
    return pytest.mark.skipif(Version(installed) < Version(lowest), reason=f"{package} {installed}: {because}")


# Seen with torch 2.7: a reduce-scatter sums where FSDP2 asks for the mean, and an all-reduce refuses to.
needs_fsdp2_on_gloo = needs("torch", "2.8", "FSDP2 does not average gradients over gloo")
