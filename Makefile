# `make` lists the targets. Everything runs from .venv, which `make setup` fills; PYTHON= chooses its interpreter.

BIN := .venv/bin
export PYTHON ?= python3
# Arguments for the program behind a target: make test ARGS='-k spool', make demo ARGS=/tmp/out
ARGS ?=
# Of each DataNode's link, in Mbit/s: make hdfs RATE=400
RATE ?=

.DEFAULT_GOAL := help
.PHONY: setup demo hdfs check test fuzz mutants bench docs help

setup: ## Install what is needed: system packages and .venv (quick when it is all there)
	@scripts/setup.sh

demo: setup ## Start a real training job four times from image, snapshot and checkpoint, and show where the time went (root)
	@examples/demo.sh $(ARGS)

hdfs: setup ## Start an HDFS that stays; RATE=400 limits its links (Mbit/s, root); ARGS=stop ends it, ARGS=status tells
	@scripts/hdfs.sh $(or $(ARGS),$(if $(RATE),start --rate-mbit $(RATE)))

check: setup ## Lint, types, import rules and module sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

# -ra (pyproject.toml) ends the run with what was skipped and why.
test: setup ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

fuzz: setup ## Three jobs read a file with parity from HDFS for ten minutes, on a busy machine and with a dead node
	BOOTSEER_SOAK_S=$${BOOTSEER_SOAK_S:-600} $(BIN)/python -m pytest -s tests/checkpoint/test_soak.py $(ARGS)

mutants: setup ## Change the deciding modules in small ways and count what their tests notice; ARGS='--show fetch/schedule.py'
	$(BIN)/python scripts/mutation_check.py $(ARGS)

bench: setup ## Measure the claims; results go to benchmarks/results
	$(BIN)/python benchmarks/run.py $(ARGS)

docs: setup ## Check the documents' links and commands, and build them as a site in build/site
	$(BIN)/python scripts/check_docs.py
	@scripts/build_docs.sh

help: ## Show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
