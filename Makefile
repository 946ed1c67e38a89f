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
DEMO := $(if $(wildcard cupy_convt3d/lab/report.py),report --out report,check)

.PHONY: demo test test-rest test-all test-large search compute-sanitizer mutants fuzz lint format docs clean

demo: $(READY)
	$(CONVT3D) $(DEMO)

# Every quick test; about 20 minutes on two cores.
test: $(READY)
	$(RUN) -m pytest tests -m "not slow and not large" $(XDIST) $(PYTEST_ARGS)

# What `make test` leaves out: random search, samples of mutants, sanitizers, all architectures, packaging, notebooks.
test-rest: search
	$(RUN) -m pytest --nbmake tests notebooks -m "slow or large" $(XDIST) $(PYTEST_ARGS)

test-all: test test-rest

# Problems that no earlier run has seen; `make search SEED=...` repeats one.
search: $(READY)
	@echo "random search: make search SEED=$(SEED) SEARCH_EXAMPLES=$(SEARCH_EXAMPLES)"
	$(CONVT3D) check --backend host --seed $(SEED) --examples $(SEARCH_EXAMPLES)

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

# Every mutant of every kernel; writes docs/mutation.md. `make test` judges a sample.
mutants: $(READY)
	$(CONVT3D) mutants --explained docs/mutation.toml --page docs/mutation.md

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
