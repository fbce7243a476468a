# Everything a developer runs. Each target makes what it needs: a fresh clone needs only python3 (3.11-3.13) and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A file's tests stay in one process and share its fixtures. Many tests wait: four processes use two cores.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: setup lint format test test-all test-slow soak demo serve proto docs clean

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
test test-all test-slow: export PYTHONDONTWRITEBYTECODE :=

# Units, properties, one of each scene of real processes, each fault once: minutes.
test: setup
	$(PYTEST) --durations=15

# The rest: every transport, every shape on Ray, every chart, the GPU kernels in the interpreter, more seeds. A Ray cluster
# of several nodes takes all cores for seconds, so its tests run after the others, one at a time.
test-all: setup
	$(PYTEST) --durations=15 -m "more and not slow and not cluster"
	$(BIN)/python -m pytest -n 0 --durations=5 -m "more and not slow and cluster"

# What takes hours.
test-slow: setup
	$(PYTEST) -m slow

# An hour of random faults and hostile clients under load, on two cores; writes the report. Then each process of a cluster
# on Ray, Ray's own too, is killed and frozen.
soak: setup
	PYTHONPATH=tests $(BIN)/python -m nemesis.run --seconds 3600 --out benchmarks/results/soak-2-cores.json
	$(BIN)/python -m pytest -m slow tests/cluster/ray/test_ray_cluster.py -k killed_or_frozen

demo: setup
	benchmarks/demo.sh $(BIN)

serve: setup
	$(BIN)/kvrelay up

# Regenerates the committed stubs.
proto: setup
	$(BIN)/python proto/generate.py

# Regenerates the reference pages.
docs: setup
	$(BIN)/python docs/generate.py
	PYTHONPATH=tests $(BIN)/python -m support.general_table

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
