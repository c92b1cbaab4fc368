"""What README.md says: its tables are the committed results, its examples run, its files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_tables_are_the_committed_results():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr or "run python benchmarks/tables.py"


@pytest.mark.parametrize("code", PYTHON_BLOCKS, ids=lambda code: code.splitlines()[0])
def test_examples_compile(code):
    compile(code, "README.md", "exec")


def test_files_that_are_linked_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)


@pytest.mark.parametrize("code", PYTHON_BLOCKS[:2], ids=("hf_poetx", "hf_flashoptim"))
def test_the_two_short_examples_run(code, tmp_path):
    """With a tiny model and data set in the place of the real ones, and few steps."""
    setup = """
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(config).save_pretrained("model")
rows = torch.randint(0, 64, (8, 12)).tolist()
dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
"""
    code = re.sub(r'"HuggingFaceTB/[^"]+"', '"model"', code).replace("max_steps=1000", "max_steps=3")
    done = subprocess.run([sys.executable, "-c", setup + code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
