# Slipstream. `make serve` starts the server; `make` says what else there is.

VENV ?= .venv
BIN := $(VENV)/bin
# The first Python that will do: 3.11, 3.12 or 3.13. PYTHON=… chooses another.
CANDIDATES := python3.13 python3.12 python3.11 python3 python
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach name,$(CANDIDATES),\
	$(shell $(name) -c "$(SUITS)" >/dev/null 2>&1 && echo $(name))))
# Where PyTorch comes from; https://download.pytorch.org/whl/cpu has smaller builds without GPU.
TORCH_INDEX_URL ?=
# Further options of pip, for all that is installed here; or a uv, which installs in its place.
PIP_OPTIONS ?=
UV ?=
install_into = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,\
	$(BIN)/python -m pip --python $(1) install --disable-pip-version-check --quiet $(PIP_OPTIONS))
INSTALL = $(call install_into,$(VENV)) --constraint constraints.txt \
	$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

.DEFAULT_GOAL := help
.PHONY: help serve test test-gpu fuzz chaos reference pictures check fix bench clients clients-of-node \
	constraints clean

help:
	@echo "make serve      start the server with the demo model, on http://127.0.0.1:8000/v1"
	@echo "                  PORT=9000         another port"
	@echo "                  MODEL=org/name    another model: a folder or a Hugging Face hub id"
	@echo "                  ARGS='--help'     any options of \`slipstream serve\`"
	@echo "make test       run all tests that need no GPU; ARGS='tests/unit -x' for some of them"
	@echo "make test-gpu   run the tests that need a GPU"
	@echo "make fuzz       run the tests with generated cases on new ones, for 20 minutes"
	@echo "                  MINUTES=5 SEED=7  other minutes; the rounds of a seed again"
	@echo "make chaos      kill, stop and cut off services amid 200 streams; takes an hour and more"
	@echo "                  ARGS='--faults 50 --streams 16 --replicas'   a minute of it"
	@echo "make reference  write docs/configuration.md and docs/supported-models.md from the code"
	@echo "make pictures   take the pictures of the chat page for the documentation"
	@echo "make check      formatting, lint, types, import contracts"
	@echo "make fix        repair what the first two of these can"
	@echo "make bench      run the benchmarks"
	@echo "make clients    install the clients that some tests drive, into .venv-clients and .venv-agents"
	@echo "make clean      remove the environment and all caches"
	@echo
	@echo "TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu installs PyTorch without GPU support."
	@echo "UV=uv has uv install what pip would, in a fifth of its time."

serve: $(VENV)/.installed
	@exec $(BIN)/slipstream serve $(MODEL) $(if $(PORT),--port $(PORT)) $(ARGS)

# One thread of torch a process: with two processes of two threads on two cores, threads spin for one
# another. Three processes for two cores, since the tests that start servers wait for much of their
# time. One process runs all tests of a file, whose models and servers are so made once, and files
# come together and in the order of tests/schedule.py. And bytecode is kept, as rewriting the tests' assertions
# takes each process 7 s, even where an image's environment says otherwise.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu" --numprocesses 3 \
		--dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: $(VENV)/.installed-dev
	@PYTHON=$(BIN)/python PYTEST_ARGS='$(ARGS)' tools/gpu_check.sh tests

fuzz: $(VENV)/.installed-dev
	@$(BIN)/python tools/fuzz.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

chaos: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.chaos $(ARGS)

reference: $(VENV)/.installed
	$(BIN)/python -m tools.reference

pictures: $(VENV)/.installed-dev
	$(BIN)/python -m tools.page_pictures $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(ARGS)

# Their dependencies contradict the server's and, with some agents', one another's, so they live
# apart, and `make -j3` installs them at once. npm's clients want node.
clients: .venv-clients/.installed .venv-agents/.installed clients-of-node

clients-of-node:
	@if command -v npm >/dev/null; then npm ci --prefix tests/clients/node --silent \
	  --no-audit --no-fund; else echo "no npm here: its packages are left out"; fi

.venv-%/.installed: tests/clients/requirements-%.txt | $(VENV)/bin/python
	@test -x $(@D)/bin/python || $(VENV)/bin/python -m venv --without-pip $(@D)
	@$(call install_into,$(@D)) --requirement $<
	@touch $@

constraints: $(VENV)/.installed-dev
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable \
	  | grep -v -e '^pip==' -e '^#' | sed 's/+.*//' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .venv-clients .venv-agents tests/clients/node/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { \
	  echo "Slipstream needs Python 3.11, 3.12 or 3.13, and none of $(CANDIDATES) is one."; \
	  echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c "$(SUITS)" || { \
	  echo "$(PYTHON) is `$(PYTHON) --version 2>&1`; Slipstream needs 3.11, 3.12 or 3.13."; exit 1; }
	@echo "Making $(VENV) with `$(PYTHON) --version` (once; PyTorch is large, this takes minutes)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python's venv module does not work; on Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(INSTALL) --editable .
	@touch $@

# Two real vocabularies for tests of decoding are data files of mistral-common; its own
# dependencies are not wanted (and would hold numpy back).
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(INSTALL) --editable '.[dev]'
	@$(INSTALL) --no-deps mistral-common
	@touch $@ $(VENV)/.installed
