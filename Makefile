PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# Ranks wait for each other for a third of the time, and two files of tests side by side fill the waits.
NUM_TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One version, in a call of its own: given a range, pip would fetch gigabytes of CUDA libraries to find the newest one.
TORCH := $(shell grep -E '^torch==' constraints.txt)
CHECKED := hf_fedshard recipes benchmarks tests

DEMO_CONFIG := accelerate_configs/cpu_fl_fsdp_4proc.yaml
DEMO_OUTPUT := runs/demo
DEMO_MAX_PERPLEXITY := 250

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all quality style clean clean-runs

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

venv: $(STAMP) ## Create the virtual environment with everything in it

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## Pre-train a small language model in 2 groups of 2 processes, a few minutes on a laptop
	rm -rf $(DEMO_OUTPUT)
	$(BIN)/accelerate launch --config_file $(DEMO_CONFIG) recipes/pretrain_clm.py \
		--args_file recipes/presets/demo.yaml --output_dir $(DEMO_OUTPUT)
	@$(BIN)/python recipes/check_result.py $(DEMO_OUTPUT)/all_results.json --max eval_perplexity=$(DEMO_MAX_PERPLEXITY)

test: $(STAMP) ## Run the tests that take seconds
	$(BIN)/python -m pytest -n $(NUM_TEST_PROCESSES) --dist loadfile -m "not slow and not gpu and not netns" $(PYTEST_ARGS)

test-all: $(STAMP) ## Run every test that this machine can run
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quality: $(STAMP) ## Check format, lint and types
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy

style: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean: ## Remove the virtual environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

clean-runs: ## Remove runs: all models, checkpoints and measurements that were made here
	rm -rf runs
