# make train   trains a small GPT on five node processes of this machine; needs Python 3.11 or newer, nothing else
# make demo    the same with three kills and a node that joins, and a picture of what that did
# make test    everything that must hold: format, lint, types, tests (but for long commands of the documents: .ci/run)

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
# By file, for the sake of shared fixtures; in the order of tests/conftest.py.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
RUN_DIR ?= runs/$@-$(shell date +%Y%m%d-%H%M%S)

.PHONY: train demo test format clean

train: $(VENV)/.installed
	$(BIN)/python scripts/train.py --preset gpt-laptop --nodes 5 --fault-tolerance 1 --steps 68 --global-batch-size 16 \
		--plan "0-5,5-10 | 0-3,3-7,7-10" --run-dir $(RUN_DIR)

demo: $(VENV)/.installed
	run_dir=$(RUN_DIR) && $(BIN)/python scripts/train.py --preset gpt-laptop --nodes 5 --max-nodes 6 --fault-tolerance 1 \
		--steps 80 --global-batch-size 16 --inject "kill:1@25:backward,kill:3@40:sum,join@50,kill:0@65:commit" \
		--run-dir $$run_dir && $(BIN)/python scripts/plot.py $$run_dir --output $$run_dir/run.png

test: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest $(IN_PARALLEL)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or give make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/.installed
