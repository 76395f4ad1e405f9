# Every target is one verb; `make` alone lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --warn-undefined-variables --no-print-directory

PYTHON ?= python3.11
JOBS ?= $(shell nproc)
KEEP ?= 0
MINUTES ?= 10

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
LOCKS := requirements/engine-cpu.lock requirements/dev.lock requirements/demo.lock
# PYTHONSAFEPATH: the folder kernels/ must never shadow the package of that name.
export PYTHONSAFEPATH := 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --no-deps: the lock is flattened, see requirements/engine-cpu.in.
$(STAMP): $(LOCKS) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/engine-cpu.lock
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements/demo.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: setup
setup: $(STAMP) native ## make .venv: the CPU engine, the tools, the appliance itself

.PHONY: native
native: $(STAMP) ## build what needs no CUDA: reference kernels and quantizer
	$(BIN)/cmake -S kernels -B kernels/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DNVFP4_CUDA=OFF -DCMAKE_BUILD_TYPE=Release --log-level=NOTICE
	$(BIN)/cmake --build kernels/build --parallel $(JOBS)

.PHONY: demo
demo: setup ## import, quantize, plan, gate, serve and ask a real small model; KEEP=1 leaves it serving
	$(BIN)/python demo/run.py $(if $(filter 1,$(KEEP)),--keep)

.PHONY: test
test: setup ## run every test this machine can run
	$(BIN)/python -m pytest -n $(JOBS) -m "not engine and not image and not serial"
	$(BIN)/python -m pytest -m "engine or image or serial"

.PHONY: unit
unit: setup ## run the tests that start no engine
	$(BIN)/python -m pytest -n $(JOBS) -m "not engine and not image and not slow"

.PHONY: fuzz
fuzz: setup ## feed every parser of checkpoints changed bytes, MINUTES=10 for each family
	nice -n 19 $(BIN)/python tests/formats/test_fuzz.py --minutes $(MINUTES)

.PHONY: lint
lint: $(STAMP) ## ruff, mypy, basedpyright, import-linter, shellcheck, yamllint, hadolint, dclint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo
	git ls-files -z '*.sh' '.ci/run' | xargs -0 $(BIN)/shellcheck
	git ls-files -z '*.sh' '.ci/run' | xargs -0 $(BIN)/shfmt -i 2 -ci -d
	git ls-files -z '*.yaml' '*.yml' | xargs -0 $(BIN)/yamllint --strict
	git ls-files -z 'Dockerfile*' | xargs -0 --no-run-if-empty $(BIN)/hadolint

.PHONY: format
format: $(STAMP) ## rewrite Python and shell in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files -z '*.sh' '.ci/run' | xargs -0 $(BIN)/shfmt -i 2 -ci -w

.PHONY: golden
golden: setup ## write the golden files again, for review as text
	$(BIN)/python tests/golden/update.py --engine

.PHONY: lock
lock: ## renew the hash locks from requirements/*.in (needs uv)
	requirements/lock.sh

-include kernels/kernels.mk docker/images.mk

.PHONY: clean
clean: ## remove what make made, but for .venv and the demo's models
	rm -rf kernels/build kernels/build-* appliance/lib/*.so .mypy_cache .ruff_cache .pytest_cache
