# Every target sets itself up: a fresh machine needs Python 3.11 or later, make, and nothing else.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
EXTRAS ?= dev
BIN := $(VENV)/bin

.PHONY: demo test check bench evaluate evaluate-explain soak docs shots clean

demo: $(VENV)/.installed  ## the daemon over a simulated vLLM and GPU that runs out of memory
	$(BIN)/fragscope demo --scenario pseudo-oom

test: check  ## everything that CI runs
	$(BIN)/python -m pytest

check: $(VENV)/.developing  ## lint and types
	$(BIN)/ruff format --check src tests bench evaluation tools deploy
	$(BIN)/ruff check src tests bench evaluation tools deploy
	$(BIN)/mypy

bench: $(VENV)/.developing  ## what a poll, a verdict and the daemon cost
	$(BIN)/python -m bench.bench

evaluate: $(VENV)/.developing  ## how often the verdict is right, on held-out simulated runs; rewrites docs/evaluation.md
	$(BIN)/python -m evaluation --write

soak: $(VENV)/.developing  ## the ten-minute runs: memory of the daemon, fuzzing of the parsers, the container
	$(BIN)/python -m pytest -s --soak tests/soak tests/deploy/test_image.py tests/explain/test_command.py

docs: $(VENV)/.developing  ## rewrite the tables of docs/ from the code, and what deploy/kubernetes is made of
	$(BIN)/python -m tools.write_docs
	$(BIN)/python deploy/kubernetes/generate.py

evaluate-explain: $(VENV)/.developing  ## the public out-of-memory reports through `explain`: a confusion table
	$(BIN)/python -m tools.evaluate_explain --write

shots: $(VENV)/.developing  ## draw docs/dashboard.png (needs prometheus, node, npm, chromium-headless-shell; nine minutes)
	$(BIN)/python -m tools.shots.draw

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "fragscope needs Python 3.11 or later with venv (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.developing: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
