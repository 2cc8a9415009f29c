# make demo   train a small GPT on two ranks of this machine
# make docs   build the documentation as a site, offline, with its links checked: build/site/index.html
# make lint   ruff and mypy
# make fast   lint, and a minute of tests: those of the lower layers that start no ranks
# make test   lint, and all tests but the thorough ones
# make thorough   those too: more of what others hold

PYTHON ?= $(shell command -v python3.11 || command -v python3)
STEPS ?= 60
VENV := .venv
BIN := $(VENV)/bin
FAST := $(wildcard tests/test_*.py) $(addprefix tests/, facts schedules strategies checkpoint launch runtime)
TWO_FILES := $(BIN)/python -m pytest -n 2 --dist loadfile
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo docs test thorough fast lint clean

demo: $(VENV)/.installed
	$(BIN)/meshwright train examples/gpt.py --strategy fsdp --ranks 2 --steps $(STEPS)

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/generate.py build/site-source
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean --strict --config-file build/mkdocs.yml

test: lint
	$(TWO_FILES)

thorough: lint
	$(TWO_FILES) -m "thorough or not thorough"

fast: lint
	$(TWO_FILES) -m "not slow and not thorough" $(FAST)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# torch goes in first and by its exact version: left to itself, pip may choose another build of several gigabytes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: found no python3 on PATH; install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Meshwright needs Python 3.11 or newer, found %s at %s; set PYTHON=" % (sys.version.split()[0], sys.executable))'
	@echo "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)
	@echo "installing torch (this takes minutes the first time)"
	@$(PIP) -r constraints.txt
	@echo "installing meshwright"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the checks need"
	@$(PIP) -c constraints.txt -e '.[dev,deepspeed]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the site needs"
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@
