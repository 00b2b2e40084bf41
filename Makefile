.DEFAULT_GOAL := help
.PHONY: help install lab course test bench gpu clean

# The Python that .venv was made with stays; `make lab PYTHON=python3.12` makes it anew with another.
PYTHON ?= $(shell .venv/bin/python -c pass 2>/dev/null && echo .venv/bin/python || echo python3)
PORT ?= 8888
FOLDER ?= $(CURDIR)
ARGS ?=
BIN := .venv/bin

# Jupyter refuses to run as root unless told; containers often are.
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

help:
	@echo "make lab      set up, then open JupyterLab on the first lab (PORT=8888)"
	@echo "make course   set up, then run every lab without a browser; pages in out/ (ARGS=\"--nproc 1 05\")"
	@echo "make test     set up, then all checks and tests (ARGS=\"-k launch\")"
	@echo "make bench    measure labkit beside its rivals"
	@echo "make gpu      what needs a GPU, recorded under data/reference/"
	@echo "make clean    remove .venv, out/, runs/ and caches"

install:
	@$(PYTHON) install.py

# root_dir and default_url rather than a path: with a path the file browser can't leave notebooks/.
lab: install
	@$(BIN)/python -m jupyterlab --ServerApp.root_dir="$(FOLDER)" --ServerApp.ip=127.0.0.1 \
		--ServerApp.port=$(PORT) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ROOT_FLAG) $(ARGS)

course: install
	@$(BIN)/python course.py $(ARGS)

# pytest comes last: its closing line is the verdict.
test:
	@$(PYTHON) install.py --with-browser
	@$(BIN)/python -m ruff check --quiet
	@$(BIN)/python -m ruff format --check --quiet
	@$(BIN)/python -m mypy
	@$(BIN)/python -m pytest $(ARGS)

bench: install
	@$(BIN)/python -m tests.bench $(ARGS)

# With the Python that is there: a machine with GPUs may have a torch of its own, and no way to fetch another.
gpu:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu

clean:
	@rm -rf .venv out runs notebooks/runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
