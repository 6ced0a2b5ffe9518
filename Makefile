# One command per chore; `make` alone lists them. Needs nothing but Python 3.11 or newer and its venv module.
#
#   TORCH_SOURCE   where pip finds a build of torch without CUDA: the address of a package index, or a folder of
#                  wheels. Without it pip's own settings decide, and on Linux a plain package index brings
#                  5 GB of CUDA.
#   PYTHON         the interpreter that makes .venv; without it the first python3* that is new enough
#   RUN_DIR, UP_FLAGS    run folder and further flags of `make demo`
#   TEST_FLAGS     further flags of pytest for test, check and soak
#   ONLY, BENCH_FLAGS    a part of the name, and flags, of the programs that `make bench` runs

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14
PACKAGES := brokers ops outer proto workers
BENCHMARKS = $(sort $(wildcard benchmarks/*.py benchmarks/*/run.py))

# A URL is an index beside the configured one, anything else a folder of wheels. The build that wins is the one
# without CUDA either way: pip ranks 2.13.0+cpu above 2.13.0.
TORCH_FLAGS = $(if $(TORCH_SOURCE),$(if $(findstring ://,$(TORCH_SOURCE)),--extra-index-url,--find-links) "$(TORCH_SOURCE)")
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_FLAGS)

.PHONY: help setup demo test check types docs soak bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@sed -n '2,/^$$/s/^#//p' Makefile

setup: $(VENV)/.installed-dev ## make .venv and install everything, tools included (TORCH_SOURCE=...)
	@:

demo: $(VENV)/.installed-train ## train the demo model on this machine in a few minutes
	@$(BIN)/isles up --run-dir $(RUN_DIR) $(UP_FLAGS)

test: setup ## the whole suite
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -n 2 $(TEST_FLAGS)

check: setup types ## ruff, mypy strict, import contracts, fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p isles
	$(BIN)/mypy tests $(wildcard benchmarks examples)
	$(BIN)/lint-imports --no-logo
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -q -n 2 -m "not slow and not soak" \
	  $(wildcard tests/unit tests/conformance tests/repo) $(TEST_FLAGS)

types: ## link the packages as isles.* for mypy and pyright
	@mkdir -p .types/isles
	@for package in $(PACKAGES); do ln -sfn ../../$$package .types/isles/$$package; done

docs: setup ## write docs/reference/ from the code
	@$(BIN)/python -P docs/generate.py

soak: setup ## the tests that take minutes
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -m soak --timeout 3600 $(TEST_FLAGS)

bench: $(VENV)/.installed-train ## run the programs in benchmarks/ one after another (ONLY=..., BENCH_FLAGS=...)
	@set -- $(foreach program,$(BENCHMARKS),$(if $(findstring $(ONLY),$(program)),$(program))); \
	if [ $$# = 0 ]; then echo "no program in benchmarks/ has '$(ONLY)' in its name" >&2; exit 2; fi; \
	for program; do echo "== $$program"; $(BIN)/python -P "$$program" $(BENCH_FLAGS) || exit; done

clean: ## remove .venv and everything that tools leave behind; runs/ stays
	rm -rf $(VENV) .types .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info

# Each stamp is newer than what it was made from, so that a second `make setup` does nothing at once.
$(VENV)/.installed-train: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing isles and what training needs into $(VENV)"
	@$(PIP_INSTALL) -e '.[relay,train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing isles, what training needs, and the tools into $(VENV)"
	@$(PIP_INSTALL) -e '.[plot,relay,train,dev]'
	@touch $(VENV)/.installed-train $@

$(VENV)/bin/python:
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make $(VENV): on Debian and Ubuntu install the package python3-venv and try again" >&2; \
	    exit 2; \
	  fi; \
	done; \
	echo "isles needs Python 3.11 or newer, and none of these is: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	exit 2
