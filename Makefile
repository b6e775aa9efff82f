# `make demo` and `make test` need Python 3.11 or newer and nothing else; both create .venv on first use.
PYTHON ?= python3
# A GPU user sets TORCH to the build that fits the driver, e.g. `make demo TORCH='torch==2.13.0 --index-url URL'`.
TORCH ?= torch==2.13.0
VENV := .venv
# Test processes: two more than processors, because tests on clusters mostly wait.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
# Areas of the campaign, all by default: make campaign AREA="layouts slurm"
AREA ?=
BIN := $(VENV)/bin
DEMO_SWEEP := model=gpt_tiny cluster=local cluster.gpus_per_node=8 run.global_batch=16 run.steps=12 \
	layout.micro_batch=2 layout.tensor=1,2,4 layout.pipeline=1,2 sweep.name=demo

# Byte code is worth having: without it every rank recompiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Tests that start a real Slurm or Kubernetes on this machine (Debian, root): `make test-clusters` runs only them.
CLUSTER_TESTS := $(addprefix tests/backends/test_,slurm.py slurm_containers.py slurm_drills.py slurm_faults.py \
	kubernetes.py kubernetes_cluster.py kubernetes_deploy.py kubernetes_indexed.py kubernetes_played.py kubernetes_sweeps.py)

.PHONY: help demo test test-fast test-clusters campaign gpu-check check lint format docs clean
help:
	@echo "make demo    environment, corpus, a sweep of layouts on 8 local processes, ranking, report"
	@echo "make test    everything the tests need, then the tests that every change must pass"
	@echo "make test-fast       the quick tests of pure functions alone"
	@echo "make test-clusters   the tests on a real Slurm and a real Kubernetes alone (Debian, root)"
	@echo "make campaign [AREA=...]  the longer proofs: more draws, more kills, planted defects (hours)"
	@echo "make gpu-check  on a machine with GPUs: is it right, how fast, and why (a quarter of an hour; gpu-check/report.txt)"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation as pages: build/docs/index.html"
	@echo "make clean   remove the environment and what runs wrote"

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"error: Python {v[0]}.{v[1]} is too old; 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if v < (3, 11) else 0)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || deploy/install-packages python3-venv
	$(PYTHON) -m venv $(VENV)
	@# torch first, so that the other packages' "torch" is satisfied by it and pulls in no GPU build.
	@# Byte code of what is used is made when it is used: a tenth of what is installed.
	$(BIN)/pip install --quiet --no-compile $(TORCH) numpy 2>&1 | { grep -v 'is ignored' || true; }
	$(BIN)/pip install --quiet --no-compile --editable '.[train,mlflow]' 2>&1 | { grep -v 'is ignored' || true; }
	@$(BIN)/trireme --version
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/pip install --quiet --no-compile --editable '.[dev]' 2>&1 | { grep -v 'is ignored' || true; }
	@# Byte code of the tests and of what they import is made here, once, and not by each of the processes that then start together.
	-@$(BIN)/python -m pytest --collect-only -qq >/dev/null
	@touch $@

demo: $(VENV)/.base
	$(BIN)/trireme prepare
	$(BIN)/trireme train -m $(DEMO_SWEEP)
	$(BIN)/trireme rank demo
	$(BIN)/trireme report demo -o report.html
	@echo
	@echo "Open report.html in a browser; see the runs in MLflow with: $(BIN)/trireme ui"
	@echo "From text to a model that writes, as one graph of stages: $(BIN)/trireme run pipeline=gpt_tiny"

test: $(VENV)/.test
	tests/system-packages
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n $(shell getconf _NPROCESSORS_ONLN) --dist loadgroup -m 'not slow' $(PYTEST_ARGS)

gpu-check: $(VENV)/.test
	$(BIN)/python benchmarks/gpu_ladder.py --out gpu-check

test-clusters: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(CLUSTER_TESTS) $(PYTEST_ARGS)

campaign: $(VENV)/.test
	tests/system-packages
	$(BIN)/python -m tests.campaign $(AREA)

check: lint test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python -m docs.pages
	$(BIN)/zensical build --strict --clean

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build runs data report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
