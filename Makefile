# Targets build on `venv`: everything pinned by constraints.txt, the kernels compiled.
# Variables: PYTHON (3.11 to 3.13), NPROC (ranks of `train`, `train-mxnet`, `train-bert`), ARGS (more options for them, `bench` or pytest).

PYTHON ?= python3
NPROC ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := $(wildcard csrc/*.h csrc/*.cc)
CUDA_SOURCES := $(wildcard csrc/cuda/*.cu)
CUDA_HEADERS := $(wildcard csrc/cuda/*.h)
BENCHMARKS := $(filter-out benchmarks/__init__.py,$(wildcard benchmarks/*.py))

# Ranks share the machine's cores: one thread each, unless told otherwise.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv train train-mxnet train-bert test lint format bench clean

help:
	@echo 'make venv    the environment in $(VENV): pinned packages, compiled kernels'
	@echo 'make train   train on glyphs with $(NPROC) ranks (ARGS="--help" lists the options)'
	@echo 'make train-mxnet  the same with a backbone in MXNet'
	@echo 'make train-bert  train a small BERT on text found among the installed packages'
	@echo 'make test    lint, then all tests'
	@echo 'make lint    formatting, rules, types, CUDA sources'
	@echo 'make format  rewrite the sources in the house format'
	@echo 'make bench   every benchmark, ours beside a peer'
	@echo 'make clean   remove what was built, except $(VENV)'

venv: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo 'expected Python 3.11 to 3.13, got "$(PYTHON)"; choose one with `make PYTHON=python3.11`' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build tools come first and pinned, so that the kernels are compiled with them and not with the newest ones.
$(INSTALLED): constraints.txt pyproject.toml setup.py $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel nanobind
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation -e '.[recipes,bert,dev,mpi,mxnet,faiss]'
	@touch $@

train: venv
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m recipes.insightface.train glyphs $(ARGS)

train-mxnet: venv
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m recipes.insightface.train_mxnet glyphs $(ARGS)

train-bert: venv
	$(BIN)/torchrun --standalone --nproc-per-node $(NPROC) -m recipes.bert.train embedded $(ARGS)

# pytest comes last: its closing line is the last one printed.
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(CUDA_SOURCES) $(CUDA_HEADERS)
ifeq ($(CUDA_SOURCES),)
	@echo 'CUDA sources: none, nothing to check'
else ifeq ($(shell command -v nvcc),)
	@echo 'CUDA sources: not checked, there is no nvcc'
else
	@for source in $(CUDA_SOURCES); do for arch in sm_75 sm_80 sm_90; do \
		echo "nvcc $$arch $$source"; nvcc -std=c++17 -arch=$$arch -cubin -o /dev/null $$source || exit 1; done; done
endif

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(CUDA_SOURCES) $(CUDA_HEADERS)

bench: venv
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f hybridpar/kernels/_native*.so $(INSTALLED)
	find hybridpar recipes tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
