# `make demo` and `make test` do their own set-up: they make .venv when it is missing or older than pyproject.toml.
# `PYTHON=python3 make test` uses that Python as it is and installs nothing (a GPU machine with no network).

BASE_PYTHON ?= python3
WORKERS ?= auto
SEED ?= $(shell date +%s)
SEED := $(SEED)
SEARCH_EXAMPLES ?= 400
PYTEST_ARGS ?=

ifdef PYTHON
RUN := $(PYTHON)
CLANG_FORMAT := clang-format
READY :=
READY_DEV :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := .venv/bin/python
CLANG_FORMAT := .venv/bin/clang-format
READY := .venv/.installed
READY_DEV := .venv/.installed-dev
endif

CONVT3D := $(RUN) -m cupy_convt3d
# Spread over the cores where pytest-xdist is installed, else run one after the other.
XDIST = $$($(RUN) -c "import xdist" 2>/dev/null && echo "-n $(WORKERS) --dist worksteal")
DEMO := report --out report

.PHONY: demo test test-rest test-all test-large search compute-sanitizer mutants plants fuzz lint format docs clean

demo: $(READY)
	$(CONVT3D) $(DEMO)

# Every quick test.
test: $(READY)
	$(RUN) -m pytest tests -m "not slow and not large" $(XDIST) $(PYTEST_ARGS)

# What `make test` leaves out: samples of mutants, sanitizers, all architectures, packaging, notebooks.
test-rest: $(READY)
	$(RUN) -m pytest --nbmake tests notebooks -m "slow or large" $(XDIST) $(PYTEST_ARGS)

test-all: test test-rest

# Every kernel's check on problems that no earlier run has seen; `make search SEED=...` repeats one.
search: $(READY)
	@echo "random search: make search SEED=$(SEED) SEARCH_EXAMPLES=$(SEARCH_EXAMPLES)"
	SEED=$(SEED) SEARCH_EXAMPLES=$(SEARCH_EXAMPLES) $(RUN) -m pytest tests/test_check.py -k shipped_kernels_pass $(XDIST) $(PYTEST_ARGS)

# On a GPU: each kernel's edge problems under each of compute-sanitizer's tools, so many at once as there are WORKERS (auto: cores);
# most of the time goes into compiling. A pair that passes is one line, any other all that was said. Reversed: the longest come early.
TOOLS := memcheck racecheck initcheck synccheck
KERNELS ?= $(shell ls -r kernels/*.cu | xargs -n 1 basename -s .cu)
compute-sanitizer: $(READY)
	@for tool in $(TOOLS); do for kernel in $(KERNELS); do echo $$tool $$kernel; done; done \
	| xargs -n 2 -P $(if $(filter auto,$(WORKERS)),$$(nproc),$(WORKERS)) sh -c 'said=$$(compute-sanitizer --tool $$0 --error-exitcode 9 \
	  $(CONVT3D) check $$1 --backend cuda --in-process --examples 0 --kind exact 2>&1); code=$$?; \
	  test $$code = 0 && said=$$(printf "%s\n" "$$said" | grep -e "passed;" -e SUMMARY | paste -s -d " "); printf "%s %s: %s\n" $$0 $$1 "$$said"; exit $$code'

# Tests for tens of gigabytes of GPU memory.
test-large: $(READY)
	$(RUN) -m pytest tests -m large $(PYTEST_ARGS)

# Every mutant of every kernel and its headers; `make docs` shows the scores. `make test-all` judges a sample.
mutants: $(READY)
	$(CONVT3D) mutants --explained docs/mutation.toml --scores docs/mutation_scores.json

# Every mistake in tests/plants by the whole check; `make docs` shows what it catches. `make test-all` judges a few.
plants: $(READY)
	$(CONVT3D) mutants --plants tests/plants --scores docs/plant_scores.json

# Fuzz through the night: make fuzz MINUTES=480
MINUTES ?= 60
fuzz: $(READY)
	$(CONVT3D) fuzz --minutes $(MINUTES)

lint: $(READY_DEV)
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	git ls-files '*.cu' '*.cuh' '*.h' | xargs $(CLANG_FORMAT) --dry-run --Werror

format: $(READY_DEV)
	$(RUN) -m ruff check --fix .
	git ls-files '*.cu' '*.cuh' '*.h' | xargs $(CLANG_FORMAT) -i

# The site in build/docs, notebooks executed; a warning is an error, and nothing is fetched.
docs: $(READY)
	$(RUN) -m sphinx -W --keep-going -q -E -b html docs build/docs
	@echo "Written: build/docs/index.html"

.venv/.installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

.venv/.installed-dev: .venv/.installed
	.venv/bin/python -m pip install --quiet -c constraints.txt -e ".[test,dev]"
	touch $@

clean:
	rm -rf docs/_generated docs/notebooks .venv build dist report .hypothesis .pytest_cache .mypy_cache .ruff_cache
