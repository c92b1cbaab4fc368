# make demo: pretrain a small Llama with POET-X and flash_adamw, merge, reload (a minute on 2 cores, installing apart)
# make test: the whole test suite
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo examples-smoke test test-slow test-lowest check clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/python examples/pretrain_from_scratch.py $(ARGS)

# The other examples, a few steps each.
examples-smoke: .venv/installed
	$(BIN)/python examples/finetune_smollm2.py --smoke --output outputs/smoke-finetune
	$(BIN)/python examples/flash_plain_pytorch.py --smoke
	$(BIN)/python examples/merge_and_push.py --smoke
	$(BIN)/python examples/evaluate_merged.py --smoke

# Triton decides between compiling and interpreting when it is imported, hence two processes.
test: .venv/installed
	$(BIN)/pytest -n 2 --ignore-glob='*/kernels/*' -m "not slow"
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 tests/flashoptim/kernels tests/poetx/kernels -m "not slow"

test-slow: .venv/installed
	$(BIN)/pytest --ignore-glob='*/kernels/*' -m slow

.venv-lowest/installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt torch
	.venv-lowest/bin/pip install --quiet --constraint constraints-lowest.txt --editable ".[dev]"
	touch $@

test-lowest: .venv-lowest/installed
	.venv-lowest/bin/pytest -n 2 --ignore-glob='*/kernels/*' -m "not slow"

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv .venv-lowest build *.egg-info
