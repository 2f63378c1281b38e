# Each target does all its own set-up in a virtual environment. It uses the torch that $(PYTHON) has, or installs $(TORCH).
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
EXTRAS = test
BIN = $(VENV)/bin
# setuptools: 77 reads the licence in pyproject.toml, and torch 2.11 asks for less than 82.
BUILD_NEEDS = "setuptools>=77,<82" ninja
# Named again where the package is installed, lest an extra like torchvision exchange the torch that it is compiled for.
TORCH_VERSION = $(BIN)/python -c "from importlib.metadata import version; print(version('torch'))"
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: demo test bench bench-models sanitize wheel docs lint build environment clean

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

# The library's CPU side under AddressSanitizer and UndefinedBehaviorSanitizer, without the quarantine, which would hide that an
# output lies over garbage; where there is a GPU, a few of the same tests under each tool of compute-sanitizer, without the cache of
# PyTorch's allocator, which would hide where a tensor ends.
SANITIZER = -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZER_LIBRARIES = $$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)
FEW = order or masked_scale or (test_layout or test_gradients_equal) and (hardtanh and 1.0 or hardsigmoid) or sizes_and_offsets and silu
KERNEL_TESTS = guards mask exact exhaustive properties inplace autograd errors smooth
sanitize: build
	FORCE_CUDA= FORCE_CPU=1 CFLAGS="$(SANITIZER)" LDFLAGS="$(SANITIZER)" \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --upgrade --target build/sanitized .
	cd tests && LD_PRELOAD="$(SANITIZER_LIBRARIES)" PYTHONPATH=../build/sanitized \
	  ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=0:thread_local_quarantine_size_kb=0 \
	  python -m pytest -m "not cuda" $(KERNEL_TESTS:%=test_%.py)
	! command -v nvidia-smi || for tool in memcheck racecheck initcheck synccheck; do \
	  (cd tests && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    python -m pytest -m cuda -k "$(FEW)" test_mask.py test_exact.py test_inplace.py test_smooth.py) || exit 1; \
	done

# An sdist and the wheel for this torch, each tried in an environment of its own before it comes to dist/: the sdist says what to
# do under build isolation and builds, its tests run against the installed wheel.
NEW = build/new
FRESH = build/fresh
wheel: environment
	rm -rf build  # lest what an earlier build has left there come into the wheel
	$(BIN)/python -c "import setuptools.build_meta as backend; backend.build_sdist('$(NEW)')"
	$(BIN)/python -m pip wheel --verbose --no-build-isolation --no-deps --wheel-dir $(NEW) .
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet "torch==$$($(TORCH_VERSION))" $(BUILD_NEEDS)
	$(FRESH)/bin/python -m pip install $(NEW)/*.tar.gz 2>&1 | tee /dev/stderr | grep "pip install --no-build-isolation ." > /dev/null
	FORCE_CUDA= FORCE_CPU=1 $(FRESH)/bin/python -m pip install --no-build-isolation $(NEW)/*.tar.gz
	$(FRESH)/bin/python -m pip uninstall --quiet --yes activations-cuda
	$(FRESH)/bin/python -m pip install --quiet "$$(ls $(NEW)/*.whl)[$(EXTRAS)]" "torch==$$($(TORCH_VERSION))"
	cd $(FRESH) && bin/python -m activations_cuda
	tar --extract --file $(NEW)/*.tar.gz --directory $(FRESH)
	cd $(FRESH)/activations_cuda-*/tests && PATH="$(abspath $(FRESH))/bin:$$PATH" python -m pytest
	mkdir -p dist && mv $(NEW)/* dist && ls -l dist

docs: EXTRAS = docs
docs: build
	$(BIN)/python -m sphinx -W docs build/docs

lint: $(BIN)/python
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/python -m pre_commit run --all-files --show-diff-on-failure

build: environment
	$(BIN)/python -m pip install --verbose --no-build-isolation --editable ".[$(EXTRAS)]" "torch==$$($(TORCH_VERSION))"

environment: $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --quiet $(BUILD_NEEDS)

$(BIN)/python:
	$(PYTHON) -m venv --system-site-packages $(VENV) || { rm -rf $(VENV); exit 1; }

clean:
	rm -rf build dist $(VENV) *.egg-info activations_cuda/*.so activations_cuda/_build.py
