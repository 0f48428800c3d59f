# `make demo` and `make test` work from a fresh clone with Python, pip, git, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := hf,lightning,quantization,observability,report,libraries,dev
STAMP := $(VENV)/.installed
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2
DURATIONS := build/test-durations.xml
TORCH_VENV = .venv-torch-$(VERSION)
CUDA_VENV := .venv-cuda
CUDA_BIN := $(CUDA_VENV)/bin
CUDA_STAMP := $(CUDA_VENV)/.installed
# `===` asks for the build of the ordinary index, and keeps one without CUDA ("2.13.0+cpu") out.
CUDA_TORCH := $(shell sed -n 's/^torch==/torch===/p' constraints.txt)

.PHONY: help demo check test test-all test-torch test-shuffled test-pages search-cases fuzz zoo durations audit docs cuda cuda-libraries lint format clean

help:
	@echo "make demo    train a small GPT-2 with and without MemScale and compare"
	@echo "make check     the quick loop, about a minute: format, lint, types, pure and small tests"
	@echo "make test      what CI runs, about a quarter of an hour: format, lint, types, every technique and model"
	@echo "make test-all  every combination, long curves, the simulator's own suite, with coverage: before a release"
	@echo "make durations       what the last run of tests cost, by file"
	@echo "make test-shuffled   the suite, its files in a random order: SEED=1 for that of seed 1"
	@echo "make test-pages      reports in a real browser; needs Chromium (Debian: apt-get install chromium)"
	@echo "make test-torch      the core lane on another PyTorch: VERSION=2.15.0, in an environment of its own"
	@echo "make search-cases    look for new failing cases of the property tests, at random"
	@echo "make fuzz            random models and random histories against plain ones: EXAMPLES=2000 for so many of each"
	@echo "make zoo             every architecture at hand against a plain copy; goes on where it was stopped"
	@echo "make audit   bandit over our code, pip-audit over what is installed (the latter asks a database on the network)"
	@echo "make docs    the documentation as a site in build/site; broken links are errors"
	@echo "make cuda    the CUDA build of PyTorch on an emulated card (no GPU needed): its tests, and a table; downloads 5 GB once"
	@echo "make cuda-libraries  the examples for Liger and timm on the emulated card"
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
	$(PYTEST) --dist loadfile --no-loadscope-reorder --junitxml=$(DURATIONS)
	$(BIN)/python tools/durations.py $(DURATIONS) --most 15

test-all: lint
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[pages,torchao,docs,coverage]"
	$(PYTEST) --dist loadfile --no-loadscope-reorder --junitxml=$(DURATIONS) -m "" --cov --cov-report=term:skip-covered --cov-report=html:build/coverage
	$(BIN)/python tools/durations.py $(DURATIONS) --most 15

test-pages: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[pages,docs]"
	$(PYTEST) -n 0 -m full tests/report/test_page_in_browser.py tests/benchmarks/test_pictures.py tests/tools/test_fit_page.py

durations: $(STAMP)
	$(BIN)/python tools/durations.py $(DURATIONS)

test-shuffled: SEED ?= $(shell date +%s)
test-shuffled: $(STAMP)
	$(PYTEST) --dist loadfile --no-loadscope-reorder --shuffle-files $(SEED)

# Another PyTorch, in an environment of its own: the core lane, files marked `unit`. INDEX=URL takes it from another index:
# PyTorch's own has builds without CUDA. What is pinned beside torch is taken where it goes with that version.
test-torch:
	@test -n "$(VERSION)" || { echo "say which: make test-torch VERSION=2.13.0"; exit 2; }
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --quiet $(if $(INDEX),--index-url $(INDEX)) 'torch==$(VERSION)'
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo 'torch==$(VERSION)' >> $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet -c $(TORCH_VENV)/constraints.txt hatchling editables setuptools wheel
	$(TORCH_VENV)/bin/pip install --quiet -c $(TORCH_VENV)/constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	$(TORCH_VENV)/bin/pip install --quiet -c $(TORCH_VENV)/constraints.txt --no-build-isolation --no-deps -e ./simgpu
	PATH="$(CURDIR)/$(TORCH_VENV)/bin:$$PATH" $(TORCH_VENV)/bin/python -m pytest -n 2 -q --dist worksteal -m "unit and not slow and not full"

search-cases: $(STAMP)
	$(PYTEST) -q --dist worksteal -m hypothesis --hypothesis-profile search

fuzz: EXAMPLES ?= 1000
fuzz: $(STAMP)
	MEMSCALE_FUZZ_EXAMPLES=$(EXAMPLES) $(PYTEST) -q -n 0 tests/training/test_random_models.py tests/training/test_histories.py \
		--hypothesis-profile search -m ""

zoo: $(STAMP)
	mkdir -p build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.zoo --log build/zoo.jsonl --out build/zoo.txt

audit: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[audit]"
	$(BIN)/bandit --quiet -c pyproject.toml -r src simgpu/src emucuda/src benchmarks tools
	$(BIN)/pip-audit --skip-editable

docs: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(CUDA_STAMP): pyproject.toml emucuda/pyproject.toml constraints.txt
	@echo "Creating $(CUDA_VENV) with the CUDA build of PyTorch: about 5 GB on disk, a few minutes the first time ..."
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_BIN)/pip install '$(CUDA_TORCH)'
	$(CUDA_BIN)/pip install -c constraints.txt hatchling editables setuptools wheel
	$(CUDA_BIN)/pip install -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	$(CUDA_BIN)/pip install -c constraints.txt --no-build-isolation --no-deps -e ./emucuda
	@touch $@

cuda: $(CUDA_STAMP)
	$(CUDA_BIN)/python -m pytest -c emucuda/pyproject.toml --rootdir emucuda emucuda/tests --ignore emucuda/tests/card --ignore emucuda/tests/memscale --ignore emucuda/tests/libraries
	$(CUDA_BIN)/python -m emucuda --races --kernels -m pytest -c emucuda/pyproject.toml --rootdir emucuda emucuda/tests/card
	$(CUDA_BIN)/python -m emucuda --races --lag 100000 -m pytest -c emucuda/pyproject.toml --rootdir emucuda emucuda/tests/memscale
	$(CUDA_BIN)/python -m emucuda.peaks bert-base gpt2 bert-large gpt2-medium gpt2-large --json docs/results/cuda.json

# Libraries that need the CUDA build of PyTorch (Liger's kernels, and torchvision, which timm imports), on the emulated card.
cuda-libraries: $(CUDA_STAMP)
	$(CUDA_BIN)/pip install --no-deps liger-kernel==0.8.5 timm==1.0.31 torchvision==0.28.0
	$(CUDA_BIN)/python -m emucuda -m pytest -c emucuda/pyproject.toml --rootdir emucuda emucuda/tests/libraries

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(CUDA_VENV) .venv-torch-* build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
