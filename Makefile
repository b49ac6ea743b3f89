# make quickstart: from nothing to a trained tiny model.  make test: every test this machine can run.
VENV ?= .venv
BIN := $(VENV)/bin
ASSETS := assets/tiny
# A process more than there are cores, because some tests wait; eight at most, for each imports the libraries again.
PYTEST_ARGS ?= -n $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8))) --dist loadfile
# As --only runs, or --on-cpu: see python -m tests.gpu_check --help.
GPU_ARGS ?=
# the installation counts in the minutes of the checks
BEGAN := $(shell date +%s)
# trixie or sid, see tests/cluster/slurm_roots.py
SLURM ?= sid
# Tests start hundreds of processes; without this each compiles our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install clients system assets quickstart test test-fast test-environments test-gpu test-gpu-packages test-slurm test-programs mutants lint format hooks lock jobs docs docs-site clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

install:  ## virtual environment with pinned dependencies
	@tools/install.sh $(VENV)

system:  ## Debian packages for the tests on a real Slurm (as root)
	@tools/install_system.sh

assets: install  ## the tiny model, its tokenizer and its prompts
	@$(BIN)/python -m rlpost.extensions.fetching.tiny_model --out $(ASSETS)

quickstart: assets  ## train the tiny model on this machine: Ray, Megatron-core, SGLang, no GPU
	$(BIN)/python -m rlpost.submit jobs/recipes/tiny.toml

clients: install  ## the environment of the gateway's clients, for their test
	@tools/install_clients.sh

test: install system assets clients  ## every tier: unit, golden, contract, real Slurm, end to end
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: install  ## unit and golden tests without the slow ones, four minutes on two cores
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) -m "not slow" tests/unit tests/golden

test-environments: install assets  ## each environment package from pip install to a trained step: 2 GB, half an hour
	$(BIN)/python -m pytest -q --on-demand tests/e2e/test_environment_packages.py

test-slurm: install system  ## the tests of batch script, preemption, requeue and arrays on another Slurm: SLURM=sid or trixie
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/cluster -m every_slurm --slurm $(SLURM)

test-gpu: install  ## every check that needs a GPU, and an answer for each, in 15 minutes with the installation
	$(BIN)/python -m tests.gpu_check --began $(BEGAN) $(GPU_ARGS)

test-gpu-packages:  ## the packages of the GPU lock, without a GPU: 9 GB, 10 minutes
	@tools/gpu_packages.sh

test-programs: install  ## agents of npm (Claude Code, Codex, qwen-code, opencode) against the gateway; 1.1 GB, a minute
	$(BIN)/python -m tests.agent_programs

mutants: install assets  ## mutation testing of six modules, half an hour on two idle cores
	@tools/mutants.sh $(VENV)

lint: install  ## style and types, seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## mend the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## versions and hashes of all packages, after a change to the requirements; needs uv
	@tools/lock.sh

jobs:  ## write jobs/*.sbatch from their recipes; needs no training stack
	@python=$$(tools/settings_python.sh $(VENV)) && $$python -m tools.make_jobs

docs: install  ## write the generated pages of docs/
	$(BIN)/python tools/make_docs.py

docs-site: install  ## the documentation as a site: build/docs-site/index.html
	$(BIN)/sphinx-build -q -E -W --keep-going docs build/docs-site

hooks: install  ## style and types before each commit
	$(BIN)/pre-commit install

clean:  ## forget the environment and what was made (runs/ stays)
	rm -rf $(VENV) .venv-clients .venv-programs .venv-mutants .venv-gpu-packages mutants assets build dist *.egg-info
