# SPDX-License-Identifier: Apache-2.0
#
# make run: set up, build, the suite on shared memory with its scorecard and on every virtual NIC, and the demo.
# make test: set up, build, every test and check.
PYTHON ?= python3
VENV ?= .venv
RANKS ?= 4
export PYTHON VENV
# Functions of make take a space for a separator, and the checkout's path may have some: of it no list is made.
BIN := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))/bin
# Inside the environment: who removes it removes what is known of it.
STAMPS := $(VENV)/stamps
export PATH := $(BIN):$(PATH)

SETUP_INPUTS := tools/setup.sh
BUILD_INPUTS := pyproject.toml CMakeLists.txt LICENSE NOTICE README.md $(shell find csrc include uccl_ep cmake tools tests/conformance \
	-type f -not -path '*/__pycache__/*' -not -path '*/.*')

.PHONY: run test build develop lint native sanitizers aarch64 unit fuzz format clean

run: $(STAMPS)/build
	@mkdir -p build
	uccl-ep conformance --backend shm --ranks $(RANKS) --html build/scorecard.html
	uccl-ep conformance --backend sim --profile all --ranks 2 --seed 1
	uccl-ep demo

test: $(STAMPS)/setup-test $(STAMPS)/test-tools
	pytest tests

build: $(STAMPS)/build

# One lane at a time, as `make test` runs them.
lint: $(STAMPS)/test-tools
	pytest tests/test_lint.py
native: $(STAMPS)/setup-test $(STAMPS)/test-tools
	pytest tests/test_native.py -k plain
sanitizers: $(STAMPS)/setup-test $(STAMPS)/test-tools
	pytest tests/test_native.py -k sanitizer
aarch64: $(STAMPS)/setup-test $(STAMPS)/test-tools
	pytest tests/test_native.py -k aarch64
unit: $(STAMPS)/test-tools
	pytest tests/unit
fuzz: $(STAMPS)/setup-test $(STAMPS)/test-tools
	pytest tests/test_fuzz.py

format: $(STAMPS)/test-tools
	ruff check --fix . && ruff format .
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cpp' '*.cu')

$(STAMPS)/setup-run: $(SETUP_INPUTS)
	sh tools/setup.sh run
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/setup-test: $(SETUP_INPUTS)
	sh tools/setup.sh test
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: $(STAMPS)/setup-run $(BUILD_INPUTS)
	@rm -rf dist
	"$(BIN)/python" -m pip wheel -q --no-deps -w dist .
	"$(BIN)/python" -m pip install -q --upgrade-strategy only-if-needed dist/*.whl
	"$(BIN)/python" -m pip install -q --no-deps --force-reinstall dist/*.whl
	@touch $@

$(STAMPS)/test-tools: $(STAMPS)/build
	"$(BIN)/python" -m pip install -q "$$(echo dist/*.whl)[test,cuda,hip,compilers]"
	@touch $@

# Python files are then used from the checkout; after a change in C or in a header, run it again.
develop: $(STAMPS)/setup-run
	"$(BIN)/python" -m pip install -q -e '.[test,cuda,hip,compilers]'
	@rm -f $(STAMPS)/build $(STAMPS)/test-tools

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
