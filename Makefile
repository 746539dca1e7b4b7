# Everything runs in .venv, which is made on first use; nothing has to be installed by hand but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests at a time, each with up to four ranks of its own (about 2 GiB together).
TEST_WORKERS ?= 2
KILLS ?= 200

.PHONY: quickstart test chaos lint format docs clean
.DELETE_ON_ERROR:

quickstart: .venv/.installed
	$(BIN)/python examples/quickstart/quickstart.py

test: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Kills workers in every phase and compares with undisturbed runs; KILLS=20 makes it shorter.
chaos: .venv/.installed-test
	$(BIN)/python -m tests.chaos --kills $(KILLS)

lint: .venv/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: .venv/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leaderless needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.installed-%: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable .[$*]
	touch $@
