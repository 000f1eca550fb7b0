# The commands of the project. Each makes .venv from requirements.txt the first time it is needed,
# and again when that file has changed.
#
#   make train [ARGS="--steps 500 --run runs/mine"]   train a small GPT on this machine
#   make test  [PYTEST_ARGS="-k reducer"]             everything that CI checks
#   make check                                        the same without the tests that take long
#   make test-clients                                 loops of other frameworks on top of gradsync (installs them)
#   make faults [ARGS="FAULTS_SEED=7"]                200 random faults in a run of two processes, each seed printed
#   make lint / make format                           style and types / mend the style
#   make clean                                        remove what the above have made (runs are kept)

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS_STAMP := $(VENV)/requirements.stamp
PACKAGE_STAMP := $(VENV)/package.stamp
TEST_MARKS := not stress and not clients
# Test files are spread over so many processes (see tests/conftest.py): many tests wait. WORKERS=0: all in one, for pdb and -s
WORKERS ?= 2
TEST_SPREAD := $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

.DEFAULT_GOAL := help
.PHONY: help train test check test-clients faults lint format clean

help:
	@sed -n 's/^#   //p' Makefile

$(REQUIREMENTS_STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"gradsync needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@echo "Making $(VENV) from requirements.txt: a few minutes, once"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --requirement requirements.txt
	@touch $@

$(PACKAGE_STAMP): $(REQUIREMENTS_STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

train: $(PACKAGE_STAMP)
	$(BIN)/gradsync train $(ARGS)

test: lint
	$(BIN)/python -m pytest $(TEST_SPREAD) -m "$(TEST_MARKS)" $(PYTEST_ARGS)

check: lint
	$(BIN)/python -m pytest $(TEST_SPREAD) -m "$(TEST_MARKS) and not distributed and not slow" $(PYTEST_ARGS)

# The constraint keeps torch and everything else that the project pins as they are.
test-clients: $(PACKAGE_STAMP)
	$(BIN)/python -m pip install --quiet --requirement tests/clients/requirements.txt --constraint requirements.txt
	$(BIN)/python -m pytest -m clients $(PYTEST_ARGS)

# A round that failed is repeated by its seed: make faults ARGS="FAULTS_SEED=1234 FAULTS_ROUNDS=1"
faults: $(PACKAGE_STAMP)
	env FAULTS_ROUNDS=200 $(ARGS) $(BIN)/python -m pytest tests/faults -k random -rA $(PYTEST_ARGS)

# One recipe, so that the order is the same under make -j and the quickest check speaks first.
lint: $(PACKAGE_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(PACKAGE_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
