# The two commands to know: `make demo` to try it, `make test` to test it.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := perfuse tests benchmarks examples tools

# Tests start many processes: compiling Perfuse's own modules anew would take each of them a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo check test bench-budget bench-cpu bench-gpu bench-memory bench-wide clean compiler compilers replay sanitize soak sweep

venv: $(STAMP)

# torch comes first and pinned: a resolver left free to choose pulls gigabytes of CUDA packages.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH)")' \
	    2>/dev/null || $(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/pip install --quiet -e '.[test,dev,bench]'
	@touch $@

# Software of others for the sweep and its sample, in a folder that nothing else looks into. Each
# torch has one torchvision: 2.13 has 0.28. Without a network, the rows that need them are skipped.
SWEEP_DEPS := .sweep_deps
TORCHVISION := 0.$(shell echo $(TORCH) | awk -F. '{print $$2 + 15}').*
$(SWEEP_DEPS)/.installed: tests/sweep/requirements.txt | venv
	-$(BIN)/pip install --quiet --no-deps --upgrade --target $(SWEEP_DEPS) \
	    -r tests/sweep/requirements.txt torchvision==$(TORCHVISION) && touch $@

compiler:
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || { \
	    echo "No C++ compiler found: install g++ (apt-get install g++) or set CXX."; exit 1; }

demo: venv compiler
	$(BIN)/python examples/demo.py

check: venv
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/mypy --strict perfuse
	@$(BIN)/python tools/size.py perfuse

# A file stays in one process: what its tests share (libraries, other processes, packages) is made once.
test: check compiler $(SWEEP_DEPS)/.installed
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not gpu and not slow" tests

# Opt-in: everything at once for MINUTES, compared with eager, memory watched.
MINUTES ?= 30
soak: venv compiler
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

# Software that others wrote against eager; goes on where it stopped (SWEEP names the results).
SWEEP ?= benchmarks/results/$(shell date +%F)-sweep
sweep: venv compiler $(SWEEP_DEPS)/.installed
	@mkdir -p $(SWEEP)
	$(BIN)/python -m tests.sweep.run --jobs 2 --results $(SWEEP)/results.json

# Which generated code changed since hashes were kept; UPDATE=1 keeps those of now.
replay: venv
	$(BIN)/python -m tests.replay.run --jobs 2 $(if $(UPDATE),--update)

bench-cpu: venv compiler
	$(BIN)/python benchmarks/cpu.py

bench-memory: venv compiler
	$(BIN)/python benchmarks/memory.py

bench-budget: venv compiler
	$(BIN)/python benchmarks/budget.py

bench-gpu: venv
	$(BIN)/python benchmarks/gpu.py

# A hundred architectures; goes on where it stopped (WIDE names the results, SECONDS ends a piece).
DEVICE ?= cpu
SECONDS ?= inf
WIDE ?= benchmarks/results/$(shell date +%F)-$(DEVICE)-wide
bench-wide: venv compiler $(SWEEP_DEPS)/.installed
	$(BIN)/python -m benchmarks.wide --device $(DEVICE) --seconds $(SECONDS) --results $(WIDE)

clean:
	rm -rf $(VENV) $(SWEEP_DEPS) build dist perfuse.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Every compiler that is installed, at -O1 to -O3; then g++ with AddressSanitizer and UBSan.
compilers: venv compiler
	$(BIN)/python -m tests.compilers.run

sanitize: venv compiler
	$(BIN)/python -m tests.compilers.run --sanitize --results sanitizers.json
