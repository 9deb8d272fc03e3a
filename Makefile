# `make` lists the targets. All programs run from .venv, which `make setup` creates; PYTHON= sets its interpreter.

BIN := .venv/bin
export PYTHON ?= python3
# If it is set, each test worker compiles all tests again.
unexport PYTHONDONTWRITEBYTECODE
# If these are set, pytest's summary has whole diffs, which hide the names of failed tests.
unexport CI BUILD_NUMBER
# Arguments for the target's program: make test ARGS='-k spool', make demo ARGS=/tmp/out
ARGS ?=
# Rate of each DataNode's link in Mbit/s: make hdfs RATE=400
RATE ?=
# Number of parallel test processes
WORKERS ?= 7

.DEFAULT_GOAL := help
.PHONY: setup demo demo-nodes hdfs check test quick fuzz mutants bench docs help

setup: ## Install system packages and .venv (fast if nothing is missing)
	@scripts/setup.sh

demo: setup ## Start a real training job four times from image, snapshot and checkpoint, and show where the time went (root)
	@examples/demo.sh $(ARGS)

demo-nodes: setup ## Start one image from one registry on 1, 2 and 4 nodes, and draw the time over the nodes (root, 3 minutes)
	@$(BIN)/python examples/demo_nodes.py $(ARGS)

hdfs: setup ## Start an HDFS that keeps running; RATE=400 limits its links (Mbit/s, root); ARGS=stop or ARGS=status
	@scripts/hdfs.sh $(or $(ARGS),$(if $(RATE),start --rate-mbit $(RATE)))

check: setup ## Lint, types, import rules and module sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

# More workers than cores: many tests wait. -ra (pyproject.toml) lists skipped tests and the reasons at the end.
test: setup ## Run the tests (13 minutes on 2 cores); WORKERS=0 runs them in one process
	@scripts/test.sh -n $(WORKERS) $(ARGS)

# The ignored folders need torch, which takes 2 s to import.
quick: WORKERS = 4  # each one collects all tests, and few of these tests wait
quick: setup ## Run the fast tests that need no root, FUSE, HDFS, torch, browser, PostgreSQL or Slurm (1.2 minutes)
	@scripts/test.sh -n $(WORKERS) --ignore=tests/checkpoint/dcp --ignore=tests/checkpoint/safetensors --hypothesis-profile=quick -m "not (root or fuse or hdfs or torch or browser or postgres or slurm or slow)" $(ARGS)

fuzz: setup ## Run random tests with more examples, kill parts of a service, and read from HDFS in three jobs for ten minutes while a node dies
	$(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=fuzz -m hypothesis $(ARGS)
	BOOTSEER_TEST_SEEDS=$${BOOTSEER_TEST_SEEDS:-10} $(BIN)/python -m pytest -n $(WORKERS) tests/service/test_faults.py $(ARGS)
	BOOTSEER_SOAK_S=$${BOOTSEER_SOAK_S:-600} $(BIN)/python -m pytest -s tests/checkpoint/test_soak.py $(ARGS)

mutants: setup ## Mutate the central modules and count the mutants that their tests detect; ARGS='fetch/hotset.py --show'
	$(BIN)/python scripts/mutation_check.py --mutants 60 --seed 0 $(ARGS)

bench: setup ## Measure the claims; results are written to benchmarks/results
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: setup ## Check the documents' links and commands, and build the site in build/site
	$(BIN)/python scripts/check_docs.py
	@scripts/build_docs.sh

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
