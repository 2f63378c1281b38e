# Each target does all its own set-up in a virtual environment. It uses the torch that $(PYTHON) has, or installs $(TORCH).
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
EXTRAS = test
BIN = $(VENV)/bin
# Named again where the package is installed, lest an extra like torchvision exchange the torch that it is compiled for.
TORCH_VERSION = $(BIN)/python -c "from importlib.metadata import version; print(version('torch'))"
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test bench bench-models lint build clean

demo: build
	$(BIN)/python -m activations_cuda

test: build
	$(BIN)/python -m pytest

bench: EXTRAS = bench$(if $(shell command -v nvidia-smi),-cuda)
bench: build
	$(BIN)/python -m benchmarks

bench-models: EXTRAS = bench-cuda
bench-models: build
	$(BIN)/python -m benchmarks.models

lint: $(BIN)/python
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/python -m pre_commit run --all-files --show-diff-on-failure

# setuptools: 77 reads the licence in pyproject.toml, and torch 2.11 asks for less than 82.
build: $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --quiet "setuptools>=77,<82" wheel ninja
	$(BIN)/python -m pip install --verbose --no-build-isolation --editable ".[$(EXTRAS)]" "torch==$$($(TORCH_VERSION))"

$(BIN)/python:
	$(PYTHON) -m venv --system-site-packages $(VENV) || { rm -rf $(VENV); exit 1; }

clean:
	rm -rf build dist $(VENV) *.egg-info activations_cuda/*.so activations_cuda/_build.py
