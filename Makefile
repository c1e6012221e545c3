# The first use of a target makes its environment; later uses need no network.

PYTHON ?= python3.11
PYTHON_NEWEST ?= python3.12
PYTEST := python -m pytest -n 2
GRADIENT_TESTS := $(addprefix tests/transforms/test_, grad.py vmap_grad.py hessian.py jvp.py \
	remat.py scan_while_cond.py) \
	$(addprefix tests/modules/test_, calls.py keys.py parameters.py state.py) \
	$(addprefix tests/sharding/test_, shard_map.py explicit_sharding.py modules.py) \
	tests/runtime/test_threads.py

# JAX leaves to torch the memory it does not use yet. Warnings are those of the machine, too.
GPU_PYTEST = JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	$(GPU_PYTHON) -m pytest -m "not sweep" -W default -rs --durations=5
GPU_ALONE := tests/gpu/test_order.py tests/gpu/test_memory.py tests/gpu/test_waiting.py
HAS_CUDA := import importlib.metadata as m, torch; \
	assert any(d.name.startswith("jax-cuda") for d in m.distributions()) and torch.version.cuda
FIND_GPU_PYTHON = python=python3; \
	if ! $$python -c '$(HAS_CUDA)' 2>/dev/null; then \
		$(MAKE) .venv-gpu/ready || exit 1; python=.venv-gpu/bin/python; \
	fi

.PHONY: demo bench docs pictures dist dist-test test test-slow test-sweeps test-all test-floor \
	test-newest test-gpu gpu-at-once gpu-alone gpu-first lint clean

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
	python -m tests.benchmarks.forces; \
	python -m tests.benchmarks.parameters; \
	python -m tests.benchmarks.devices; \
	python -m tests.benchmarks.memory; \
	python -m tests.benchmarks.startup; \
	python -m tests.benchmarks.trace; \
	python -m tests.benchmarks.report

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

dist: .venv/ready
	.venv/bin/python -m build --no-isolation

# The wheel in an environment of its own, without a compiler.
dist-test: .venv/ready
	.venv/bin/python -m pytest tests/docs/test_dist.py -m ""

test: lint
	.venv/bin/$(PYTEST)

test-slow: .venv/ready
	.venv/bin/$(PYTEST) -m "slow and not sweep"

test-sweeps: .venv/ready
	.venv/bin/$(PYTEST) -m sweep
	for tape in off 0 1; do .venv/bin/$(PYTEST) --tape=$$tape $(GRADIENT_TESTS) || exit 1; done
	EQX_TORCH_GRAPHS=check .venv/bin/$(PYTEST) $(GRADIENT_TESTS)

test-all: test test-slow test-sweeps

test-floor: .venv-floor/ready
	.venv-floor/bin/$(PYTEST)

test-newest: .venv-newest/ready
	.venv-newest/bin/$(PYTEST)

# By the Python that is there if it has JAX and torch for CUDA, else in an environment made for it.
test-gpu:
	@if ! nvidia-smi -L 2>/dev/null; then \
		echo "tests/gpu is skipped: this machine has no CUDA device"; exit 0; \
	fi; \
	$(FIND_GPU_PYTHON); \
	$(MAKE) -k gpu-at-once gpu-alone GPU_PYTHON=$$python

# What only hardware can say, a line of JSON a step.
gpu-first:
	@$(FIND_GPU_PYTHON); \
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $$python -m tests.gpu.first

gpu-at-once:
	$(GPU_PYTEST) -n 4 tests/gpu $(addprefix --ignore=,$(GPU_ALONE))

gpu-alone:
	$(GPU_PYTEST) $(GPU_ALONE)

# What the pages of the examples show is drawn and printed by one run of each.
pictures: .venv/ready
	.venv/bin/python docs/pictures.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

clean:
	rm -rf .venv .venv-floor .venv-newest .venv-gpu build dist site examples/out .pytest_cache .ruff_cache .hypothesis
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

# These two download gigabytes: what pip finds of torch for Linux brings CUDA with it.
.venv-newest/ready: pyproject.toml constraints.txt
	$(PYTHON_NEWEST) -m venv .venv-newest
	grep -vE '^(jax|jaxlib|torch)==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/pip install -e '.[dev]' 'jax==0.12.*' torch==2.14.1 -c .venv-newest/constraints.txt
	touch $@

.venv-gpu/ready: pyproject.toml constraints.txt
	$(PYTHON_NEWEST) -m venv .venv-gpu
	grep -vE '^(jax|jaxlib|torch)==' constraints.txt > .venv-gpu/constraints.txt
	.venv-gpu/bin/pip install -e '.[dev]' 'jax[cuda13]==0.11.2' torch==2.11.0 -c .venv-gpu/constraints.txt
	touch $@
