# Every target sets up what it needs, in .venv, once; again when the dependencies change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TREE   := build/tree

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-slow browsers fuzz faults torch kernels models results holdout lint tree serve clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

setup: $(READY)  ## create .venv with everything that development needs

$(READY): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "confpred needs Python 3.10 to 3.13, and '$(PYTHON)' is not: choose one, as in" \
	       "'make PYTHON=python3.12 setup'" >&2; exit 1; }
	@echo "Setting up $(VENV), some minutes the first time ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=23.2'
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev,triton]'
	@touch $@

demo: $(READY)  ## retrain, judge, predict and serve; on a GPU machine sample and launch too
	$(BIN)/python examples/demo.py

test: lint  ## lint, types, import direction, and the fast tests; minutes
	$(call run_tests,-m "not slow")

test-all: lint  ## the same with every test that this machine can run, and the 30 slowest
	$(call run_tests,--durations 30)

test-slow: $(READY)  ## what test-all has beyond test
	$(call run_tests,--durations 30 -m slow)

# Tests on a GPU have it for themselves; the others share the cores, and a worker that has
# nothing left takes tests of another. Servers and their clients fail, too, where other tests leave
# them too little time: failures have to fail alone as well, and the first that does ends the run.
define run_tests
	@if nvidia-smi --list-gpus >/dev/null 2>&1; then \
	  $(BIN)/python -m pytest $(1) tests/gpu || [ $$? -eq 5 ]; fi  # 5: none is of that kind
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal $(1) tests/cpu tests/browser || \
	  { [ $$? -eq 1 ] && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none \
	    --exitfirst $(1) tests/cpu tests/browser; }
endef

fuzz: $(READY)  ## schemathesis asks a served confpred for a quarter of an hour; seconds of it are in test-slow
	CONFPRED_FUZZ_EXAMPLES=10000 $(BIN)/python -m pytest tests/cpu/service/test_service_schemathesis.py

faults: $(READY)  ## plant each fault of tests/faults in a copy, and see that the fast tests notice; a quarter of an hour
	$(BIN)/python tests/faults/plant.py

torch: $(READY)  ## run the PyTorch tests with the PyTorch of VERSION=2.9.1, say, and record what passes; gigabytes
	$(BIN)/python tests/torch_versions.py --version $(VERSION)

kernels: $(READY)  ## compile every kernel of every family for every target; some CPU-hours, resumable
	$(BIN)/python tests/compile_kernels.py --out build/kernels.jsonl

holdout: $(READY)  ## compile the hold-out's kernels into archives in build/; some CPU-hours, resumable
	@for part in fprop dgrad wgrad; do \
	  rm -f build/holdout-$$part.tar.xz && CONFPRED_CACHE_MIB=4096 CONFPRED_CACHE_DIR=build/kernels \
	  $(BIN)/confpred sample --suite datasets/suites/holdout/$$part.json --out build/planned \
	    --compile h200 --archive build/holdout-$$part.tar.xz || exit 1; \
	done

models: $(READY)  ## train the shipped models again from the committed measurements; minutes
	$(BIN)/python -m benchmarks.reproduce models

results: $(READY)  ## judge by the committed measurements again, and fill the tables of all results
	$(BIN)/python -m benchmarks.reproduce results

lint: $(READY) tree  ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml
	cd $(TREE) && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

# The package as it is installed: service, kernels, models and suites lie beside confpred in the repository
# and inside it in an installation, which is where their imports make sense.
tree:
	@rm -rf $(TREE) && mkdir -p $(TREE) && cp -R confpred $(TREE)/
	@cp -R service kernels models datasets/suites $(TREE)/confpred/

serve: $(READY)  ## answer config queries over HTTP on 127.0.0.1:8000
	$(BIN)/confpred serve

clean:  ## remove everything that was built here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
