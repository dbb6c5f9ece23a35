# Each target sets itself up: the first call creates .venv, later calls reuse it.
# torch_npu goes beside the environment, into .venv/npu-site: with it inside, `import torch` fails where there is no CANN.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE ?= 1

.PHONY: setup demo demo-cpu test parity conformance upstream-npu lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/npu-site torch_npu==2.13.0
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

demo-cpu: $(READY)
	$(BIN)/python examples/demo.py --accelerator cpu

test: $(READY)
	$(BIN)/python -m pytest -q

# Every layout, schedule and option against one process; writes docs/parity.md. About 20 minutes on 2 cores.
parity: $(READY)
	$(BIN)/python -m tests.parity_matrix $(if $(ONLY),--only $(ONLY))

conformance: $(READY)
	$(BIN)/python tests/conformance/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/run.py
	$(BIN)/python -m ascend_emulator --devices 1 benchmarks/emulator.py

# torch_npu's own tests, cloned into build/; see docs/upstream-torch-npu.md.
upstream-npu: $(READY)
	$(BIN)/python -m ascend_emulator --devices 8 -m tests.upstream_npu.run $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) build *.egg-info
