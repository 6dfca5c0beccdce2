# Each target sets up .venv by itself. PYTHON names the interpreter to start from.
PYTHON ?= python3
PY := .venv/bin/python
# Where PYTHON has no torch of its own.
TORCH := torch==2.13.0

# An active .venv must not be the one to rebuild itself.
export PATH := $(subst $(CURDIR)/.venv/bin:,,$(PATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-slow soak test-clients test-titan test-vllm test-oldest test-newest docs speed test-gpu gpu gpu-tests gpu-memory gpu-bench gpu-replay gpu-hip bench readme lint format build release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready ## Run the demo
	@$(PY) -m ficco demo

# What catches most in a minute: the pure half, the rules of the house, and every operator and its
# gradients on two ranks.
QUICK := tests/units $(addprefix tests/contract/test_contract.py::test_,forward gradient)

quick: lint ## Before a commit: lint, then the tests that catch most, in a minute
	$(PY) -m pytest -q -m "not slow and not gpu and not multigpu" -n 2 $(QUICK)

# Workers and the processes of tests share what one of them has compiled.
quick test test-slow: export PYTHONDONTWRITEBYTECODE :=

# Three tests at a time on two cores: many wait for other processes.
PYTEST := $(PY) -m pytest -n 3 --dist worksteal
CPU := not gpu and not multigpu and not clients

test: lint ## Lint, then run the tests: every operator on the CPU engine, plans, faults and tools
	$(PYTEST) -m "not slow and $(CPU)"
	@echo "make test-slow runs the rest: more engines and numbers of ranks, kernels, compilers, packages"

test-slow: .venv/.ready ## Run the rest of the tests that need no GPU: more engines and ranks, kernels, compilers, packages
	$(PYTEST) -m "slow and $(CPU)"

test-clients: ## Run ficco inside torchtitan, Transformers and Megatron-core, in an environment of their own
	PYTHON=$(PYTHON) tests/environments/install.sh clients
	build/clients/bin/python -m pytest -m clients tests/clients --ignore tests/clients/test_vllm.py

test-titan: ## Run ficco inside torchtitan with a later PyTorch: all its backends, compiled, type-checked (6 GB)
	PYTHON=$(PYTHON) tests/environments/install.sh clients-titan
	build/clients-titan/bin/python -m pytest -m clients tests/clients/test_torchtitan.py

test-vllm: ## Run ficco inside vLLM, in an environment of its own (3 GB)
	PYTHON=$(PYTHON) tests/environments/install.sh clients-vllm
	build/clients-vllm/bin/python -m pytest -m clients tests/clients/test_vllm.py

# What PyTorch 2.6 itself lacks is skipped: docs/versions.md has it.
ENDS := $(addprefix tests/test_,all_gather_matmul.py operators.py gradients.py nn.py changed_layers.py passes.py library.py \
  attention.py packed.py ulysses.py projections.py experts.py modes.py) tests/faults/test_board.py tests/contract

test-oldest: ## Run the contract, attention, experts, layers, styles and passes on PyTorch 2.6, in an environment of its own (5 GB)
test-newest: ## Run the same on PyTorch 2.14, in an environment of its own (6 GB)
test-oldest test-newest: test-%:
	PYTHON=$(PYTHON) tests/environments/install.sh $*
	build/$*/bin/python -m pytest -q -m "not slow and not gpu and not multigpu" -n 2 $(ENDS)

docs: .venv/.docs ## Check what the pages say, build the documentation into build/site/; a warning is an error
	$(PY) -m docs.make.check
	rm -rf build/site
	$(PY) -m sphinx -q -W --keep-going -E -d build/doctrees -c docs -b html . build/site
	@echo "open build/site/index.html"

speed: .venv/.ready ## On a quiet machine: what ficco costs the host, against its limits
	$(PY) -m benchmarks.host_speed

# SECONDS or CALLS, SEED, RANKS ("2 4": rounds by turns) and DEVICE (cuda) are the soak's.
soak: .venv/.ready ## For SECONDS=300: jittered calls of all operators, each result compared; says how to repeat a failure
	$(PY) tests/soak.py $(if $(CALLS),--calls $(CALLS),--seconds $(or $(SECONDS),300)) --ranks $(or $(RANKS),2) \
	  $(if $(SEED),--seed $(SEED)) --device $(or $(DEVICE),cpu)

test-gpu: .venv/.ready ## Run the tests that need GPUs
	$(PY) -m pytest -m "gpu or multigpu"

bench: .venv/.ready ## Time schedules, serial and PyTorch's fused ops; results in build/bench/
	@$(PY) -m ficco bench --out build/bench

# Takes PYTHON's own packages: a machine with GPUs has its own torch.
gpu: gpu-tests gpu-memory gpu-bench ## On a machine with GPUs: tests, memory check, benches into RESULTS

RESULTS ?= build/gpu
SECONDS_EACH ?= 200

gpu-tests:
	$(PYTHON) -m pytest -m "gpu or multigpu" -p no:cacheprovider

# Errors of API calls are not reported: NCCL and the binding probe for functions that a driver may lack.
gpu-memory:
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 --target-processes all \
	  $(PYTHON) -m ficco demo --device cuda --out $(RESULTS)/demo

gpu-bench:
	for set in measured small decode unseen scenarios; do \
	  $(PYTHON) -m ficco bench --device cuda --set $$set --seconds $(SECONDS_EACH) --rounds 600 --schedules candidates auto \
	    --out $(RESULTS) --name $$set || exit 1; \
	done
	$(PYTHON) -m ficco bench --device cuda --mode queued,idle --seconds 340 --rounds 100 \
	  --operator matmul_reduce_scatter matmul_all_reduce all_to_all_matmul all_to_all_transposed_matmul --schedules candidates auto \
	  --out $(RESULTS) --name family
	$(PYTHON) -m ficco bench layers --device cuda --seconds 90 --out $(RESULTS) --name layers
	$(PYTHON) -m ficco bench --device cuda --set weight-gradients --mode queued,idle --seconds 120 --rounds 7 \
	  --without pytorch-pieces pytorch-native --schedules candidates auto --out $(RESULTS) --name weight-gradients
	$(PYTHON) -m benchmarks.kernel_rates

gpu-replay: ## On one GPU of NVIDIA's: products whose tiles wait, as one of four ranks sees them
	$(PYTHON) -m ficco replay --world 4 --machine h200-4 --products \
	  --set waiting --operator all_gather_matmul matmul_all_to_all --mode queued,idle --seconds 150 --rounds 15 \
	  --schedules candidates=3 tiled tiled:pieces=2 tiled:pieces=4 auto --out $(RESULTS) --name replay

gpu-hip: ## On NVIDIA GPUs: the HIP engine through HIP's API on CUDA's driver, compared with the CUDA engine
	$(PYTHON) tests/hip_on_cuda.py --out $(RESULTS)/hip-on-cuda

readme: .venv/.ready ## Put the tables of results into README.md and docs/results/README.md, and draw README's picture
	$(PY) -m docs.make.readme
	$(PY) -m docs.make.overlap

lint: .venv/.ready ## Check style, format, types and language
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m docs.make.language

format: .venv/.ready ## Fix style and format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

build: .venv/.ready ## Build the sdist and the wheel into dist/
	$(PY) -m build --no-isolation

release: .venv/.ready ## Check and build a release, try its wheel in a clean environment, print the commands to publish it
	PYTHON=$(PYTHON) TORCH=$(TORCH) .ci/release

clean: ## Remove .venv, builds and caches
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ficco tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted set-up starts again from nothing. A torch that PYTHON can import is
# kept: it was built for this machine's GPUs. The .pth file finds it when PYTHON is itself a virtual environment.
.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$(PYTHON) makes no virtual environments: name another by \
	PYTHON=..., or install what it lacks (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@rm -rf .venv
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  echo "setting up .venv with the torch of $(PYTHON)" && \
	  $(PYTHON) -m venv --system-site-packages .venv && \
	  $(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
	    > "$$(echo .venv/lib/python*/site-packages)/torch.pth"; \
	else \
	  echo "setting up .venv with torch from the package index" && \
	  $(PYTHON) -m venv .venv && \
	  $(PY) -m pip install -q $(TORCH); \
	fi
	@$(PY) -m pip install -q -e ".[dev]"
	@touch $@

# Only `make docs` needs these packages.
.venv/.docs: .venv/.ready
	@$(PY) -m pip install -q -e ".[docs]"
	@touch $@
