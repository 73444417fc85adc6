# Every target does the set-up it needs: a .venv in this folder with the exact
# versions of constraints.txt. Needs only Python 3.11 or newer.
#
#   make test ARGS="tests/kernels -x"     arguments for pytest
#   make bench ARGS="kernels"             arguments for python -m bench
#   make demo PYTHON=python3.12           the Python that .venv is made from

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
ARGS ?=
# Processes that share the tests. Each begins with one half and takes from the other's
# when it is done: a file is split at most a few times, and what its tests share is then
# read from the cache of programs. (One file a process leaves one idle for a third.)
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
NEWER := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help install demo demo-lm test test-all versions lint house bench accelerators clean docs docs-serve docs-links dist

help:
	@echo "make demo     train privately on real data; results in runs/demo"
	@echo "make demo-lm  pretrain and privately tune two small language models; runs/demo-lm"
	@echo "make test     the fast tests         (ARGS=... goes to pytest)"
	@echo "make test-all all tests: builds, kills, planted faults, studies too"
	@echo "make versions fast tests of the wheel with the newest and lowest dependencies"
	@echo "make lint     ruff and pyright"
	@echo "make house    measure the structure of the library"
	@echo "make bench    quick benchmarks       (ARGS=... goes to python -m bench)"
	@echo "make accelerators compile for an H100 and for TPUs, which need not be there"
	@echo "make docs     build the documentation, strictly; docs/_build/html"
	@echo "make docs-serve show it at http://localhost:8000"
	@echo "make docs-links check its links to other sites"
	@echo "make dist     build and check sdist and wheel; dist"
	@echo "make install  only the set-up: .venv with the versions of constraints.txt"
	@echo "make clean    remove build products and caches; keeps .venv and runs"

# Beside a clone that is named jaxdp, `import jaxdp` finds the folder of the clone before
# the finder of an editable install; a path that leads to the package comes before both.
LINK := import pathlib, sysconfig; \
  site = pathlib.Path(sysconfig.get_paths()["purelib"]); \
  link = site.parent / "checkout" / "jaxdp"; \
  link.parent.mkdir(exist_ok=True); \
  link.unlink(missing_ok=True); \
  link.symlink_to(pathlib.Path("jaxdp").resolve()); \
  (site / "jaxdp_checkout.pth").write_text(str(link.parent))

install: $(STAMP)

# The build backend goes in first and is used without isolation, so that it too has
# the version of constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c '$(NEWER)' 2>/dev/null || $(PYTHON) -c '$(NEWER)' 2>/dev/null || \
	  { found=$$($(PYTHON) --version 2>&1) || found="not found"; \
	    echo "jaxdp needs Python 3.11 or newer, but '$(PYTHON)' is $$found;" \
	    "name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BIN)/python -c '$(NEWER)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes"
	@$(PIP) install -qq -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]' | \
	  grep --line-buffered -E '^(Collecting|Installing|Successfully)'
	@$(BIN)/python -c '$(LINK)'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m jaxdp.cli train --dataset digits --epsilon 2 --out runs/demo --overwrite
	$(BIN)/python -m bench digits --quick --out runs/demo --json runs/demo/study.json

demo-lm: $(STAMP)
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[lm]'
	$(BIN)/python -m bench docstrings --out runs/demo-lm --json runs/demo-lm/study.json

# Programs that were compiled are read again by all of these, in every clone: compiling is
# most of what the tests take.
test test-all versions docs: export JAX_COMPILATION_CACHE_DIR ?= \
  $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxdp
test test-all versions docs: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
test test-all versions docs: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)
	$(PYTEST) $(ARGS)

# On Python 3.11, 3.12 and 3.13 where they are found, in environments of their own.
versions: $(STAMP)
	$(BIN)/python -m tests.versions $(ARGS)

# What is published: .github/workflows/publish.yml does the same.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

lint: $(STAMP)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m pyright

house: $(STAMP)
	$(BIN)/python -m tests.house $(ARGS)

# Every page is executed, and what it prints is shown. A warning is an error: a name that is
# not documented, a link within the site that leads nowhere, a cell that raises.
SPHINX := $(BIN)/python -m sphinx -W --keep-going -q docs docs/_build
docs: $(STAMP)
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[docs]'
	$(SPHINX)/html -b html -j 2
	@echo "docs/_build/html/index.html"

docs-serve: docs
	$(BIN)/python -m http.server --directory docs/_build/html 8000

docs-links: $(STAMP)
	@$(PIP) install -qq -c constraints.txt --no-build-isolation -e '.[docs]'
	$(SPHINX)/links -b linkcheck -D nb_execution_mode=off

bench: $(STAMP)
	$(BIN)/python -m bench $(or $(ARGS),--quick)

# XLA's compilers for devices that are not here, each in an environment of its own: a
# plugin would otherwise look for its device wherever JAX starts.
CUDA := jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86 \
  nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 \
  nvidia-nvjitlink-cu12==12.9.86
TPU := libtpu==0.0.42.1
AHEAD := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1

.venv-h100/.installed: NEEDS = $(CUDA)
.venv-tpu/.installed: NEEDS = $(TPU)
.venv-%/.installed: constraints.txt
	@$(PYTHON) -m venv --clear .venv-$*
	@echo "Installing into .venv-$*; the first time this takes a few minutes"
	@pip=".venv-$*/bin/python -m pip --disable-pip-version-check install -qq"; \
	  $$pip -c constraints.txt setuptools && \
	  $$pip -c constraints.txt --no-build-isolation -e '.[lm]' && \
	  $$pip --no-deps $(NEEDS) && touch $@

accelerators:
	@for of in h100:h100 tpu:v5e; do env=.venv-$${of%:*}; \
	  if $(MAKE) --no-print-directory $$env/.installed; then \
	    kept=bench/results/$${of#*:}-aot; \
	    $(AHEAD) $$env/bin/python -m bench accelerators $(ARGS) \
	      $(if $(ARGS),,--json $$kept/accelerators.json) || exit 1; \
	    $(if $(ARGS),,$(AHEAD) $$env/bin/python -m bench.accelerators excerpts $${of#*:} \
	      > $$kept/excerpts.txt || exit 1;) \
	  else echo "skipped: the packages of $$env cannot be had"; fi; done
	$(if $(ARGS),,test ! -e .venv-tpu/.installed || $(AHEAD) .venv-tpu/bin/python \
	  -m bench sharded --json bench/results/v5p-aot/sharded.json)

clean:
	rm -rf build dist docs/_build *.egg-info .pytest_cache .jax_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
