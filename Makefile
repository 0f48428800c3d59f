# `make demo` and `make test` work from a fresh clone with Python, pip, git, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := hf,lightning,quantization,observability,dev
STAMP := $(VENV)/.installed

.PHONY: help demo test test-shuffled check search-cases format clean

help:
	@echo "make demo    train a small GPT-2 with and without MemScale and compare"
	@echo "make test    the whole test suite, what CI runs"
	@echo "make check   the quick loop: format, lint, types, fast tests"
	@echo "make test-shuffled   the suite, its files in a random order: SEED=1 for that of seed 1"
	@echo "make search-cases    look for new failing cases of the property tests, at random"
	@echo "make format  rewrite the code in our format"
	@echo "make clean   remove the environment and caches"

$(STAMP): pyproject.toml simgpu/pyproject.toml constraints.txt
	@echo "Creating $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch hatchling editables setuptools wheel
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation --no-deps -e ./simgpu
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

test-shuffled: SEED ?= $(shell date +%s)
test-shuffled: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --shuffle-files $(SEED)

search-cases: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n 2 --dist worksteal -m hypothesis --hypothesis-profile search

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
