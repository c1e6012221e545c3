# The first use of a target makes its environment; later uses need no network.

PYTHON ?= python3.11
PYTEST := python -m pytest -n 2

.PHONY: demo bench test test-all test-floor lint clean

demo: .venv/ready
	.venv/bin/python examples/digits.py

# What the neighbour compiles at its first use needs a C++ compiler and ninja.
bench: .venv/ready-bench
	export PATH="$(CURDIR)/.venv/bin:$$PATH"; set -e; \
	python -m tests.benchmarks.call_overhead; \
	python -m tests.benchmarks.train_step; \
	python -m tests.benchmarks.train_step --cores 1; \
	python -m tests.benchmarks.train_step --compiled; \
	python -m tests.benchmarks.vmap; \
	python -m tests.benchmarks.devices; \
	python -m tests.benchmarks.memory; \
	python -m tests.benchmarks.startup; \
	python -m tests.benchmarks.trace; \
	python -m tests.benchmarks.report

test: lint
	.venv/bin/$(PYTEST)

test-all: lint
	.venv/bin/$(PYTEST) -m ""

test-floor: .venv-floor/ready
	.venv-floor/bin/$(PYTEST)

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

clean:
	rm -rf .venv .venv-floor build dist site examples/out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without the constraints pip may choose a build of torch that brings gigabytes of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -e '.[dev]' -c constraints.txt
	touch $@

.venv/ready-bench: .venv/ready
	.venv/bin/pip install -e '.[dev,bench]' -c constraints.txt
	touch $@

.venv-floor/ready: pyproject.toml constraints.txt constraints-floor.txt
	$(PYTHON) -m venv .venv-floor
	grep -vE '^(jax|jaxlib)==' constraints.txt | cat - constraints-floor.txt > .venv-floor/constraints.txt
	.venv-floor/bin/pip install -e '.[dev]' -c .venv-floor/constraints.txt
	touch $@
