"""Imports go downwards only: kernels <- ops <- plain torch <- Hugging Face; and neither package imports the other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hf_poetx", "hf_flashoptim")
HUGGING_FACE = {"transformers", "peft", "accelerate", "huggingface_hub", "safetensors", "datasets", "trl", "evaluate"}
# Modules above plain torch: the only ones that may import Hugging Face libraries.
INTEGRATION = {
    "hf_poetx": {
        "__init__",
        "config",
        "layer",
        "linear",
        "model",
        "targets",
        "checkpoint",
        "trainer",
        "report",
        "export",
        "card",
        "adapter_card",
        "cli",
    }
    | {"adapter_file", "adapter_report", "estimate", "merge_plan", "publish", "skeleton", "tensor_file"},
    "hf_flashoptim": {"__init__", "trainer", "monitor"},
}
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def top_level(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path):
    package, *folders, module = path.relative_to(ROOT).with_suffix("").parts
    names = imported_modules(path)
    other = next(name for name in PACKAGES if name != package)
    assert other not in top_level(names), "the two packages are independent"
    if folders == ["kernels"] and module != "__init__":
        own = {name for name in names if name.startswith(package)}
        assert all(name.startswith((f"{package}.kernels",)) for name in own), "kernels import only kernels"
    if folders == ["ops"]:
        own = {name for name in names if name.startswith(f"{package}.")}
        assert all(name.startswith((f"{package}.kernels", f"{package}.ops")) for name in own), (
            "ops import ops and kernels"
        )
    if folders or module not in INTEGRATION[package]:
        assert not top_level(names) & HUGGING_FACE, "only the integration modules import Hugging Face libraries"
