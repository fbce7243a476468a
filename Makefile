# Everything a developer runs. Each target makes what it needs: a fresh clone needs only python3 (3.11-3.13) and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A file's tests stay in one process and share its fixtures. Many tests wait: three processes use two cores.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: setup lint format test test-again test-slow soak demo serve proto docs clean

setup: $(READY)

# torch goes first: once it is there, no other package pulls another build of it.
$(READY): pyproject.toml packaging/client/pyproject.toml constraints.txt helm/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable packaging/client --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement helm/requirements.txt
	touch $(READY)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p kvrelay
	$(BIN)/lint-imports --no-cache --no-logo

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each test process, and each that it starts, would compile the sources again.
test test-again test-slow: export PYTHONDONTWRITEBYTECODE :=

test: setup
	$(PYTEST) --durations=15

# What failed in the last run, in one process. A virtual machine that stands still for seconds fails tests of failure
# detection, which takes three; what fails here too is broken.
test-again: setup
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-slow: setup
	$(PYTEST) -m slow

# An hour of random faults and hostile clients under load, on two cores; then each process of a cluster on Ray, Ray's own
# too, is killed and frozen. Writes the reports.
soak: setup
	PYTHONPATH=tests $(BIN)/python -m nemesis.run --seconds 3600 --out benchmarks/results/soak-2-cores.json
	$(BIN)/python benchmarks/siege.py deaths --json benchmarks/results/siege-2-cores.json

demo: setup
	$(BIN)/python benchmarks/demo.py

serve: setup
	$(BIN)/kvrelay up

# Regenerates the committed stubs.
proto: setup
	$(BIN)/python proto/generate.py

# Regenerates the reference pages.
docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
