# Everything runs in .venv, which the first target that needs it makes: no need to activate it.
# Another Python: make PYTHON=python3.12 demo

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# 2: TensorFlow's C++ half logs errors only.
export TF_CPP_MIN_LOG_LEVEL ?= 2

# Where nothing compiled is kept, each of the tests' processes compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# A worker a core and one more, as some tests mostly wait for processes of their own; four at most:
# each starts TensorFlow and takes 1 GB of memory. A worker without tests left takes half of what
# another still has to do.
WORKERS := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4 --dist worksteal
PYTEST := $(BIN)/python -m pytest $(WORKERS)

.PHONY: help demo test test-fast test-nightly test-versions lint wheel check-wheel coverage docs compat faults simulate ray-test bench third-party clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# Lines that TensorFlow's C++ half prints before it reads the variable above; no GPU is used.
EARLY_LINES := -e '^WARNING: All log messages before absl::' -e '^[IWE]0000 00:00:'

demo: $(VENV)/.installed-demo ## Train a real model on 4 virtual devices and check the result
	@$(BIN)/python examples/demo.py 2> >(grep -v $(EARLY_LINES) >&2)

# With oneDNN, TensorFlow looks through all kernels for each op of a graph: a fifth of the tests' time.
test test-fast test-nightly: export TF_ENABLE_ONEDNN_OPTS ?= 0

test: $(VENV)/.installed-dev ## Run the tests
	@$(PYTEST)

test-fast: $(VENV)/.installed-dev ## Run one test of each kind, between two edits
	@$(PYTEST) -q @tests/fast_tests.txt

test-nightly: export TFCDO_NIGHTLY := 1
test-nightly: export TFCDO_PROGRAMS := 300
test-nightly: export TFCDO_EXAMPLES := 1000
test-nightly: export TFCDO_SCHEDULES := 100000
test-nightly: $(VENV)/.installed-dev ## Run them with all cases and 300 random programs
	@$(PYTEST)

test-versions: $(VENV)/.installed-versions ## Run test-fast on TensorFlow 2.16 to the newest: docs/versions.md
	@$(BIN)/nox $(SESSIONS)

lint: $(VENV)/.installed-dev ## Check style, types and the arrows between the rooms
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

wheel: $(VENV)/.installed-dev ## Build dist/tfcdo-*.whl and the sdist
	@$(BIN)/python pip_package/build_wheel.py --output dist

check-wheel: wheel ## Install the wheel in an empty environment, use it there, and build it from the sdist
	@$(BIN)/python pip_package/check_wheel.py dist/tfcdo-*.whl --sdist dist/tfcdo-*.tar.gz

coverage: $(VENV)/.installed-dev ## Run the tests and show which branches of tfcdo/ they miss
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q $(WORKERS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

docs: $(VENV)/.installed-docs ## Build the documentation in build/docs; a warning is an error
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

compat: $(VENV)/.installed-dev ## Run TensorFlow's classes and tfcdo's side by side: docs/compat.md
	@$(BIN)/python tools/compat.py

faults: $(VENV)/.installed-dev ## Kill, stop, cut off and take away hosts of 200 trainings, two hours: docs/faults.md
	@PYTHONPATH=.:tests/helpers $(BIN)/python tools/faults.py $(CASES)

simulate: $(VENV)/.installed-dev ## Run a million schedules of faults on the cluster's rules, half an hour
	@PYTHONPATH=.:tests/helpers $(BIN)/python tests/cluster/simulator.py --schedules 1000000

RAY := .venv-ray/bin
ray-test: .venv-ray/.installed ## Kill, lose and add workers of a training on Ray Train
	@PYTHONPATH=.:tests/helpers $(RAY)/python tests/end_to_end/ray_test.py

.venv-ray/.installed: pyproject.toml | $(BIN)/uv
	@[ -x $(RAY)/python ] || $(PYTHON) -m venv .venv-ray
	@$(call install,.venv-ray,--editable '.[ray]' --editable '.[cli]')
	@touch $@

bench: $(VENV)/.installed-dev ## Measure everything on this machine, alone on it: docs/performance.md
	@$(BIN)/python tools/performance.py

THIRD_PARTY := .venv-third-party/bin
third-party: | $(BIN)/uv ## Run programs of other libraries under both strategies: docs/third-party.md
	@[ -x $(THIRD_PARTY)/python ] || $(PYTHON) -m venv .venv-third-party
	@$(call install,.venv-third-party,-r tools/third_party.txt --editable .)
	@$(call install,.venv-third-party,--no-deps tf-models-official==2.20.0)
	@$(THIRD_PARTY)/python tools/third_party.py $(PROGRAMS)

clean: ## Remove .venv and all that the other targets made
	rm -rf $(VENV) .venv-third-party .venv-ray build dist *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find tfcdo tests tools pip_package -name __pycache__ -prune -exec rm -rf {} +

# The environment. A stamp names the extra that is installed and is as old as the pyproject.toml
# it was read from, so a second run of a target has nothing to install.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON) here: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "tfcdo needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# uv takes seconds for what takes pip a minute. It knows nothing of pip's settings, such as the
# address of a mirror: where it fails, pip installs. $(call install,FOLDER OF ENVIRONMENT,ARGUMENTS)
install = $(BIN)/uv pip install --python $(1)/bin/python $(2) 2>&1 | grep --line-buffered -v '^ [+~-] ' || { \
	  echo "uv failed; pip tries, with its own settings"; $(1)/bin/python -m pip install -q --disable-pip-version-check $(2); }

$(BIN)/uv: | $(BIN)/python
	@$(BIN)/pip install -q --disable-pip-version-check uv

$(VENV)/.installed-%: pyproject.toml | $(BIN)/uv
	@echo "Installing tfcdo[$*] in $(VENV) (once; TensorFlow alone is about 600 MB):"
	@$(call install,$(VENV),--editable '.[$*]')
	@touch $@
	@[ $* != dev ] || { touch $(VENV)/.installed-demo; $(MAKE) --no-print-directory test-path; }

# A test file finds its helpers when it runs alone, too: python tests/plan/packing_test.py
.PHONY: test-path
test-path:
	@printf '%s\n' '$(CURDIR)/tests/helpers' '$(CURDIR)/tools' \
	  >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tfcdo_tests.pth"
