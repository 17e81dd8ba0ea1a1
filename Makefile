# One command per job. Everything installs into .venv, made from PYTHON (3.10 or newer).
#
#   make demo [ARGS="--broker redis --store postgresql"]    see it work
#   make test    the whole suite, on real servers it starts itself      make unit    what needs no server
#   make campaigns   long runs that print a table each: kills, outage, transactions, redelivery, governed-kills,
#                    ledger
#   make chaos | bench | conformance | simulate | fuzz | mutants | model   the proofs: each a table, and without ARGS
#                    its section of docs/explanation/evidence.md
#   make matrix   every cell of pools x brokers x canvases x faults; writes docs/reference/matrix.md
#   make matrix-versions   every Python found here with every Celery      make public-suites   two foreign projects' own tests
#   make check   what CI runs: lint, types, test                        make clean   remove what was built here
#   make guarantees   write docs/reference/guarantees.md from a run of the tests it names

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Most of the suite waits for workers and servers of its own. A file stays in one process; in their own order the many
# short ones of tests/unit come last, so that no process idles beside a long one.
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The demo needs the extras of governed actions, and the clients of the services its arguments name.
DEMO_EXTRAS := governed http $(if $(findstring redis,$(ARGS)),redis) $(if $(findstring postgres,$(ARGS)),postgres)
empty :=
comma := ,
DEMO_NAME := $(subst $(empty) $(empty),$(comma),$(strip $(DEMO_EXTRAS)))
DEMO_STAMP := $(VENV)/.runtime$(if $(DEMO_NAME),-$(subst $(comma),-,$(DEMO_NAME)))
DEMO_SERVERS := $(strip $(if $(findstring redis,$(ARGS)),redis-server) \
    $(if $(findstring postgres,$(ARGS)),postgresql) $(if $(findstring amqp,$(ARGS))$(findstring rabbit,$(ARGS)),rabbitmq-server))
DEMO_SPEC := .$(if $(DEMO_NAME),[$(DEMO_NAME)])

.DEFAULT_GOAL := help
PROOFS := chaos bench conformance simulate fuzz mutants model
CAMPAIGNS := kills outage transactions redelivery governed-kills ledger
.PHONY: help demo test unit check guarantees matrix lint types campaigns $(CAMPAIGNS) proofs $(PROOFS) matrix-versions public-suites services checkers clean

help:
	@sed -n '3,$${/^#/!q; s/^# \{0,1\}//; p;}' Makefile

demo: $(DEMO_STAMP)
	@$(if $(DEMO_SERVERS),scripts/install-services $(DEMO_SERVERS))
	@$(BIN)/python -m example_project.demo $(ARGS)

test: $(VENV)/.dev services
	$(BIN)/pytest $(PARALLEL) $(ARGS)

unit: $(VENV)/.dev
	$(BIN)/pytest $(PARALLEL) tests/unit $(ARGS)

# In this order and one after the other, so that pytest's closing line is the last thing said.
check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory test

guarantees: $(VENV)/.dev services
	GUARANTEES_FILE=docs/reference/guarantees.md $(BIN)/pytest $(PARALLEL) -m guarantee

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

matrix: $(VENV)/.dev services
	MATRIX_FILE=docs/reference/matrix.md $(BIN)/pytest tests/matrix $(ARGS)

campaigns: $(CAMPAIGNS)

$(CAMPAIGNS) matrix-versions public-suites: $(VENV)/.dev services
	$(BIN)/python -m tests.campaigns.$(subst -,_,$@) $(ARGS)

proofs: $(PROOFS)

bench: $(VENV)/.bench
mutants: $(VENV)/.mutants

model: checkers

$(PROOFS): $(VENV)/.dev services
	$(if $(ARGS),,EVIDENCE_FILE=docs/explanation/evidence.md )$(BIN)/python -m tests.$@ $(ARGS)

services:
	@scripts/install-services

checkers:
	@scripts/install-services spin gcc libc6-dev

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment, made once and kept in step with pyproject.toml --------------------------------------------------

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) here. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); celery_idem needs 3.10 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || scripts/install-services python3-venv || { \
	    echo "$(PYTHON) cannot make a virtual environment; install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

$(VENV)/.mutants: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mutants]'
	@touch $@

$(DEMO_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '$(DEMO_SPEC)'
	@touch $@
