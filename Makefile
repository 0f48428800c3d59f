# `make demo` and `make test` work from a fresh clone with Python, pip, git, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := hf,lightning,quantization,observability,dev
STAMP := $(VENV)/.installed
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2
DURATIONS := build/test-durations.xml

.PHONY: help demo check test test-all test-shuffled search-cases durations lint format clean

help:
	@echo "make demo    train a small GPT-2 with and without MemScale and compare"
	@echo "make check     the quick loop, under a minute: format, lint, types, pure and small tests"
	@echo "make test      what CI runs, under a quarter of an hour: format, lint, types, every technique and model"
	@echo "make test-all  every combination, long curves, the simulator's own suite: before a release"
	@echo "make durations       what the last run of tests cost, by file"
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

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(PYTEST) -q --dist worksteal -m "unit and not slow and not full"

test: lint
	$(PYTEST) --dist loadfile --junitxml=$(DURATIONS)
	$(BIN)/python tools/durations.py $(DURATIONS) --most 15

test-all: lint
	$(PYTEST) --dist loadfile --junitxml=$(DURATIONS) -m ""
	$(BIN)/python tools/durations.py $(DURATIONS) --most 15

durations: $(STAMP)
	$(BIN)/python tools/durations.py $(DURATIONS)

test-shuffled: SEED ?= $(shell date +%s)
test-shuffled: $(STAMP)
	$(PYTEST) --dist loadfile --no-loadscope-reorder --shuffle-files $(SEED)

search-cases: $(STAMP)
	$(PYTEST) -q --dist worksteal -m hypothesis --hypothesis-profile search

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
