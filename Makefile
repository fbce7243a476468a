# Everything a developer runs. Each target makes what it needs: a fresh clone needs only python3 (3.11-3.13) and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PACKAGES := client cluster decode_worker engine kernels models prefill_worker router rpc transfer worker

.PHONY: setup lint format test test-slow demo serve proto typing clean

setup: $(READY)

# torch goes first: once it is there, no other package pulls another build of it.
$(READY): pyproject.toml constraints.txt helm/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement helm/requirements.txt
	touch $(READY)

# mypy can't follow the editable install's import hook, so it gets the same map as a folder of links.
typing:
	mkdir -p build/typing/kvrelay/internal
	for name in $(PACKAGES); do ln -sfn ../../../$$name build/typing/kvrelay/$$name; done
	ln -sfn ../../../proto/gen/kvrelay/v1 build/typing/kvrelay/v1
	ln -sfn ../../../../proto/gen/kvrelay/internal/v1 build/typing/kvrelay/internal/v1

lint: setup typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(addprefix -p kvrelay.,$(PACKAGES))

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

demo: setup
	$(BIN)/python benchmarks/demo.py

serve: setup
	$(BIN)/kvrelay up

# Regenerates the committed stubs.
proto: setup
	$(BIN)/python proto/generate.py

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
