# The first use of a target makes its environment; later uses need no network.

PYTHON ?= python3.11
PYTEST := python -m pytest -n 2

PICTURES := digits ensemble forces hessian neural_ode sentence_head

.PHONY: demo test test-all test-floor pictures lint clean

demo: .venv/ready
	.venv/bin/python examples/digits.py

test: lint
	.venv/bin/$(PYTEST)

test-all: lint
	.venv/bin/$(PYTEST) -m ""

test-floor: .venv-floor/ready
	.venv-floor/bin/$(PYTEST)

# The pictures of the documentation are those that the examples draw.
pictures: .venv/ready
	for name in $(PICTURES); do .venv/bin/python examples/$$name.py || exit; done
	cp $(PICTURES:%=examples/out/%.png) docs/images

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
