# Every target sets itself up: a virtual environment, pinned installs, then the job.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-fast test-gpu test-sanitize test-aarch64 lint bench docs wheel clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not gpu"

# The library's quick tests, for while you work: under a minute.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 -q -m "not gpu and not slow" tests --ignore tests/examples --ignore tests/integrations

# On a machine with CUDA, with the torch that is installed there.
test-gpu:
	PYTHONPATH=src:reproduce/src $(PYTHON) -m pytest -m gpu $$(grep -rl 'mark\.gpu' tests reproduce/tests --include=*.py)
	PYTHONPATH=src $(PYTHON) -m pytest tests/backends/test_triton*.py

# The C++ kernels against loops in double, under AddressSanitizer and UBSan.
test-sanitize:
	cmake -S . -B build/sanitize -DFASTFF_SANITIZE=ON
	cmake --build build/sanitize --parallel 2
	build/sanitize/fastff_check

# The same check, compiled for 64-bit ARM and run by an emulator.
test-aarch64:
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool > /dev/null || { \
		echo "make test-aarch64 needs $$tool: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done
	cmake -S . -B build/aarch64 -DFASTFF_CHECK=ON -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
	cmake --build build/aarch64 --parallel 2
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/fastff_check

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py

docs: $(READY)
	$(BIN)/sphinx-build -W -b html docs docs/_build

# dist/: an sdist, and a manylinux wheel that passes its tests without a compiler.
wheel:
	PYTHON=$(PYTHON) scripts/wheel.sh

clean:
	rm -rf $(VENV) build dist docs/_build

# pip's -c keeps every later install at the pinned torch.
$(READY): pyproject.toml reproduce/pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]" -e "./reproduce[ray]"
	touch $@
