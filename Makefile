# `make` lists the targets. Everything runs from .venv, which `make setup` fills; PYTHON= chooses its interpreter.

BIN := .venv/bin
export PYTHON ?= python3
# Where it is set, each worker of the tests compiles all of them again.
unexport PYTHONDONTWRITEBYTECODE
# Where these are set, pytest's summary has whole diffs, behind which the names of the tests that failed are lost.
unexport CI BUILD_NUMBER
# Arguments for the program behind a target: make test ARGS='-k spool', make demo ARGS=/tmp/out
ARGS ?=
# Of each DataNode's link, in Mbit/s: make hdfs RATE=400
RATE ?=
# Processes that run tests side by side
WORKERS ?= 7

.DEFAULT_GOAL := help
.PHONY: setup demo demo-nodes hdfs check test quick fuzz mutants bench docs help

setup: ## Install what is needed: system packages and .venv (quick when it is all there)
	@scripts/setup.sh

demo: setup ## Start a real training job four times from image, snapshot and checkpoint, and show where the time went (root)
	@examples/demo.sh $(ARGS)

demo-nodes: setup ## One image on 1, 2 and 4 nodes behind one registry: time against nodes, as a picture (root, 3 minutes)
	@$(BIN)/python examples/demo_nodes.py $(ARGS)

hdfs: setup ## Start an HDFS that stays; RATE=400 limits its links (Mbit/s, root); ARGS=stop ends it, ARGS=status tells
	@scripts/hdfs.sh $(or $(ARGS),$(if $(RATE),start --rate-mbit $(RATE)))

check: setup ## Lint, types, import rules and module sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

# More than there are cores: many tests wait. -ra (pyproject.toml) ends the run with what was skipped and why.
test: setup ## Run the tests (13 minutes on 2 cores); WORKERS=0 runs them in one process
	@scripts/test.sh -n $(WORKERS) $(ARGS)

# All of these folders needs torch, which takes 2 s to import.
quick: WORKERS = 4  # each collects all tests, and few of these wait
quick: setup ## The fast tests, of those that need no root, FUSE, HDFS, torch, browser, PostgreSQL or Slurm (1.2 minutes)
	@scripts/test.sh -n $(WORKERS) --ignore=tests/checkpoint/dcp --ignore=tests/checkpoint/safetensors --hypothesis-profile=quick -m "not (root or fuse or hdfs or torch or browser or postgres or slurm or slow)" $(ARGS)

fuzz: setup ## Random tests with many more examples, a service whose parts are killed, and three jobs that read from HDFS for ten minutes while a node dies
	$(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=fuzz -m hypothesis $(ARGS)
	BOOTSEER_TEST_SEEDS=$${BOOTSEER_TEST_SEEDS:-10} $(BIN)/python -m pytest -n $(WORKERS) tests/service/test_faults.py $(ARGS)
	BOOTSEER_SOAK_S=$${BOOTSEER_SOAK_S:-600} $(BIN)/python -m pytest -s tests/checkpoint/test_soak.py $(ARGS)

mutants: setup ## Change the deciding modules in small ways and count what their tests notice; ARGS='fetch/hotset.py --show'
	$(BIN)/python scripts/mutation_check.py --mutants 60 --seed 0 $(ARGS)

bench: setup ## Measure the claims; results go to benchmarks/results
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: setup ## Check the documents' links and commands, and build them as a site in build/site
	$(BIN)/python scripts/check_docs.py
	@scripts/build_docs.sh

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
