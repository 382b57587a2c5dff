# Every target makes .venv and installs what it needs first; nothing else has to be done by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench format clean

demo: $(INSTALLED)
	$(BIN)/fastformer demo --out demo

# Two processes of one thread each: the tests are many and small.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.run --quick

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info fastformer/*.so

# --no-build-isolation: an isolated build would fetch a second torch to compile against.
$(INSTALLED): setup.py pyproject.toml constraints.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy "setuptools>=77" wheel ninja pybind11
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@
