# Two commands for a newcomer: make quickstart, make test. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

ARGS ?=

.PHONY: quickstart test lint clean

quickstart: $(INSTALLED)
	$(VENV)/bin/t2t quickstart $(ARGS)

test: $(INSTALLED) lint
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
