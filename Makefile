# The first use of a target makes its environment; later uses need no network.

PYTHON ?= python3.11
PYTEST := python -m pytest -n 2
GRADIENT_TESTS := $(addprefix tests/test_, grad.py vmap_grad.py hessian.py jvp.py remat.py \
	scan_while_cond.py shard_map.py explicit_sharding.py module_calls.py module_keys.py \
	module_parameters.py module_sharding.py module_state.py threads.py)

.PHONY: demo docs dist dist-test test test-all test-floor lint clean

demo: .venv/ready
	.venv/bin/python examples/digits.py

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

dist: .venv/ready
	.venv/bin/python -m build --no-isolation

# The wheel in an environment of its own, without a compiler.
dist-test: .venv/ready
	.venv/bin/python -m pytest tests/test_dist.py -m ""

test: lint
	.venv/bin/$(PYTEST)

test-all: lint
	.venv/bin/$(PYTEST) -m ""
	for tape in off 0 1; do .venv/bin/$(PYTEST) --tape=$$tape $(GRADIENT_TESTS) || exit 1; done

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

.venv-floor/ready: pyproject.toml constraints.txt constraints-floor.txt
	$(PYTHON) -m venv .venv-floor
	grep -vE '^(jax|jaxlib)==' constraints.txt | cat - constraints-floor.txt > .venv-floor/constraints.txt
	.venv-floor/bin/pip install -e '.[dev]' -c .venv-floor/constraints.txt
	touch $@
