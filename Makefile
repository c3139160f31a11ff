# Everything runs in the virtual environment .venv, which each target sets up when it needs to. No root is needed.
#   make demo       one prompt from prefill to decode, on a real model    (options: make demo ARGS=--json)
#   make test       all tests but the long ones, with branch coverage     (options: make test ARGS="-k wire")
#   make test-real  the tests that need the real model, which is fetched once (93 MB)
#   make soak       everything at full scale, and the real model's tests
#   make asan      the native kernels under AddressSanitizer and UBSan
#   make lint       style, types, layers, nothing newer than Python 3.10
#   make bench      layer streaming                                       (others: make bench ARGS=list)
#   make clean      removes .venv and everything that was built
# make PYTHON=/path/to/python3 ... chooses the Python of .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
CODE := kvstore transports codecs bench tests examples .ci
ARGS ?=
# tests of one file stay in one process, files are spread over three: many wait for children, deadlines and disks
# (one after the other, as for --pdb: make test ARGS="-n 0 ...")
SPREAD := -n 3 --dist loadfile
export PYTHON
# pyright: no notice about newer releases; node comes from a wheel where the machine has none
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# children of tests find the data file and settings wherever they run
export COVERAGE_FILE := $(CURDIR)/.coverage

.PHONY: help demo test test-real soak asan bench lint lint-style lint-types lint-layers lint-py310 format clean setup-demo setup-dev

help:
	@sed -n 's/^#   //p' Makefile

# one stamp a set of extras: installed once, and again when the project's requirements change
NATIVE := $(wildcard codecs/kvferry/codecs/native/*.c codecs/kvferry/codecs/native/*.h codecs/kvferry/codecs/native/CMakeLists.txt)
$(VENV)/.installed-%: pyproject.toml constraints.txt .ci/setup .ci/find-python $(NATIVE)
	@.ci/setup $(VENV) $*
	@touch $@

setup-demo: $(VENV)/.installed-demo
	@:
setup-dev: $(VENV)/.installed-dev,demo
	@:

demo: setup-demo
	@$(BIN)/kvferry demo $(ARGS)

test: setup-dev
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest $(SPREAD) -m "not soak and not real_model" --durations=15 $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(if $(strip $(ARGS)),echo "coverage: not judged with ARGS",$(BIN)/python .ci/check_coverage.py 90 kvferry.core kvferry.wire)

test-real: setup-dev
	@$(BIN)/python -m pytest -m "real_model and not soak" --durations=5 $(ARGS)

soak: setup-dev
	@$(BIN)/python -m pytest -m "soak or real_model" --timeout 3600 --durations=15 $(ARGS)

asan: setup-dev
	@$(BIN)/python -m pytest tests/unit/codecs/test_native.py -k sanitizers $(ARGS)

bench: setup-demo
	@$(BIN)/kvferry bench $(if $(ARGS),$(ARGS),stream)

lint: lint-style lint-types lint-layers lint-py310

lint-style: setup-dev
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --check; exit 1; }

lint-types: setup-dev
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/pyright --pythonpath $(BIN)/python

lint-layers: setup-dev
	@PYTHONPATH=kvstore:transports:codecs:bench $(BIN)/lint-imports --no-logo --no-cache

lint-py310: setup-dev
	@$(BIN)/vermin --quiet --no-tips --violations --eval-annotations --target=3.10- \
	    $$(find $(CODE) -name '*.py')

format: setup-dev
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
