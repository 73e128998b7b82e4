# Each target makes .venv when it is missing, so a fresh clone needs no other command.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help train results test test-slow test-gpu lint format bench goals numerics planning setup clean

help:            ## show this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+: *##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

train: $(READY)  ## train a small byte-level GPT with Muon and with AdamW on Python's own source, and compare (about 4 minutes)
	@$(BIN)/python -m meshmuon train $(ARGS)

test: lint       ## ruff, mypy and pytest (what CI runs)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: $(READY) ## the full grids, run before an issue is called resolved
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: $(READY) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

lint: $(READY)   ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

bench: $(READY)  ## step time beside torch.optim.Muon and fused AdamW
	$(BIN)/python -m benchmarks.bench_step $(ARGS)

goals: $(READY)  ## on a GPU: every goal of speed and accuracy, measured and judged (half an hour)
	$(BIN)/python -m benchmarks.goals runs/goals $(ARGS)

numerics: $(READY) ## distance to the exact polar factor, written to docs/numerics.md
	$(BIN)/python -m benchmarks.numerics $(ARGS)

planning: $(READY) ## predicted steps of large jobs by route, written to docs/planning.md
	$(BIN)/python -m benchmarks.planning $(ARGS)

results: $(READY) ## tables and figures of the experiments in docs/results, written to docs/results.md
	$(BIN)/python -m benchmarks.results $(ARGS)

setup: $(READY)  ## make .venv and install everything

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing meshmuon and its tools into .venv (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e ".[cli,train,dev]"
	@touch $(READY)

clean:           ## remove .venv and what runs wrote
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .hypothesis
