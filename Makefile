# Everything a checkout needs: `make demo`, `make test`. Installs into .venv, touches nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?=
JOBS ?= 2
export PIP_CONSTRAINT := constraints.txt

.PHONY: demo test lint docs format clean

demo: $(VENV)/installed
	$(BIN)/tile-ep demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-dev
	$(BIN)/python docs/api.py

clean:
	rm -rf $(VENV) site dist build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "needs Python 3.10 or later; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt install python3-venv"; exit 1; }

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV), once"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing what the tests need, once"
	@$(PIP) install --editable '.[dev]'
	@touch $@
