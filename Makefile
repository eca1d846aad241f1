# The two commands are `make demo` and `make test`; `make help` lists the rest.
#
# The virtual environment is .venv, with torch pinned and installed first (constraints.txt). For PyTorch's CPU build, which
# is smaller by gigabytes of CUDA, set PIP_EXTRA_INDEX_URL to its index, as the README does.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := $(wildcard csrc/*) setup.py
CXX_FILES = $(shell find csrc tests benchmarks tools -name "*.h" -o -name "*.cpp" -o -name "*.cu" -o -name "*.cuh")

# What is compiled: for the CPU; where there is nvcc, for the GPUs that are here, and for tests of the library, without a GPU,
# for one architecture. GRADSTAT_CUDA=1 asks for all architectures, GRADSTAT_CUDA_ARCHITECTURES for others, 0 for none.
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9.]+$$' | tr -d . | sort -u)
ARCHITECTURES_HERE := $(or $(GRADSTAT_CUDA_ARCHITECTURES),$(GPUS),90)
BUILT_FOR_TESTS := $(VENV)/.built$(if $(filter 0 1,$(GRADSTAT_CUDA)),$(if $(filter 0,$(GRADSTAT_CUDA)),-cpu,-all))
BUILT := $(if $(GPUS)$(filter 1,$(GRADSTAT_CUDA)),$(BUILT_FOR_TESTS),$(VENV)/.built-cpu)

export GRADSTAT_WERROR := 1
# Where it is set, as in many containers, each of the hundreds of processes of the tests compiles torch's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
ifndef SIDE_BY_SIDE
.NOTPARALLEL: # all targets install into one environment
endif
.PHONY: demo test lint format bench bench-full bench-ranks bench-frameworks bench-detection numerics fuzz sanitize wheel gpu gpu-code fields clean help leaks

# What a stage does and how long it takes on two idle cores; its own output goes on.
say = @echo "== $(1)"

demo: $(VENV)/.for-demo $(BUILT) ## Train a small GPT with every step checked, then corrupt it and see which module the diagnosis names
	$(call say,The demo: 300 training steps and what checks cost in one; a minute or two)
	$(BIN)/python -m gradstat demo

# Number of parallel test processes. More than one per core, or a dozen in total, compete for the core or for memory.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))

test: $(VENV)/.torch ## Run the tests on all cores (WORKERS=1: one after another; GRADSTAT_CUDA=1: compile for all GPUs)
	@+$(MAKE) --no-print-directory -j2 SIDE_BY_SIDE=1 $(VENV)/.for-test $(BUILT_FOR_TESTS) # a compilation beside an installation
	$(call say,The tests in $(WORKERS) processes; some minutes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Large trainers run in a separate environment, as installing some of them changes how others behave.
.PHONY: frameworks
frameworks: ## Run DeepSpeed and the other large trainers for real (an environment of its own, gigabytes)
	$(MAKE) VENV=$(VENV)-frameworks run-frameworks

.PHONY: run-frameworks
run-frameworks: $(VENV)/.for-frameworks $(BUILT)
	GRADSTAT_FRAMEWORKS=1 $(BIN)/python -m pytest tests/frameworks

.PHONY: coverage
coverage: $(VENV)/.for-dev $(BUILT_FOR_TESTS) ## Run the tests and report line coverage of Python, in build/coverage/html; fails under 95 %
	mkdir -p build/coverage && rm -f build/coverage/data*
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

lint: $(VENV)/.for-lint ## Check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.for-lint ## Rewrite the sources in the enforced style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# RECORD=--record appends the results to benchmarks/results, for docs/project.md.
fuzz: $(VENV)/.for-test $(BUILT) ## A million random tensors through every operation, and 500 random programs under a monitor
	GRADSTAT_LONG=1 $(BIN)/python -m pytest -q tests/life/test_life_monitor.py
	$(BIN)/python tools/fuzz.py $(RECORD)

sanitize: $(VENV)/.for-test ## The C++ code under AddressSanitizer, UBSan and ThreadSanitizer, in the tests that reach it
	$(BIN)/python tools/sanitize.py

.PHONY: coverage-cxx
coverage-cxx: $(VENV)/.for-dev ## Run the tests that reach C++ and report line coverage of C++; fails under 90 %
	$(BIN)/python tools/coverage_cxx.py

bench: $(VENV)/.for-bench $(BUILT) ## Time checks, clips and training steps against torch on this machine, in under three minutes
	$(BIN)/python benchmarks/suite.py

bench-full: $(VENV)/.for-test $(BUILT) ## Measure everything, record it, redraw the charts and rewrite the tables
	$(BIN)/python benchmarks/suite.py --full --record
	$(BIN)/python benchmarks/plots.py
	$(BIN)/python benchmarks/render.py --write

bench-ranks: $(VENV)/.for-test $(BUILT) ## Time distributed clips, on two ranks of this machine
	$(BIN)/torchrun --nproc-per-node 2 benchmarks/ranks.py

bench-frameworks: $(VENV)/.for-test $(BUILT) ## Time the integrations and what the frameworks offer themselves
	$(BIN)/python benchmarks/frameworks.py

# JOBS: processes.
bench-detection: $(VENV)/.for-test $(BUILT) ## Break small trainings on purpose and count what the monitor and other tools find; record it (JOBS=1: about an hour)
	$(BIN)/python -m pip install --quiet --no-deps defaultplusplus==0.4.1
	$(BIN)/python benchmarks/detection.py --jobs $(or $(JOBS),1) --record
	$(BIN)/python benchmarks/render.py --write

numerics: $(VENV)/.for-test $(BUILT) ## Compare norms of 100,000 vectors of every dtype with exact ones, by gradstat, torch and numpy
	$(BIN)/python -W ignore benchmarks/numerics.py --record
	$(BIN)/python benchmarks/render.py --write

wheel: $(VENV)/.for-test ## Build sdist and wheel (one for every Python >= 3.10 and torch >= 2.10, with CUDA if there is nvcc) into dist/, and try it
	$(call say,The wheel for all GPUs; ten minutes)
	rm -rf dist build/wheel-env
	GRADSTAT_CUDA=$(or $(GRADSTAT_CUDA),$(if $(shell command -v nvcc),1,0)) $(BIN)/python .ci/distribution.py dist
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet -c constraints.txt torch dist/*.whl
	cd build && wheel-env/bin/python ../tools/first_use.py && wheel-env/bin/gradstat info

.PHONY: matrix
matrix: wheel $(VENV)/.for-dev ## Try the wheel with every Python and torch this machine can install; an hour, gigabytes
	$(BIN)/nox -f tools/noxfile.py -t usual -- dist/*.whl

.PHONY: tour
tour: $(VENV)/.for-docs $(BUILT) ## Run docs/tour.ipynb and save it with its outputs
	$(BIN)/python docs/run_tour.py

.PHONY: docs
docs: $(VENV)/.for-docs $(BUILT) ## Build the site, searchable and without any network, into build/site, and check it
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/site
	$(BIN)/python tools/check_site.py build/site
	@echo "open build/site/index.html"

# Beside the newest Triton, that of torch 2.11, which many machines with a GPU have: only its package, first on the path,
# for the oldest architecture and the H100's.
OLDER_TRITON := 3.6.0

gpu-code: $(VENV)/.for-bench $(VENV)/.for-triton $(VENV)/.triton-$(OLDER_TRITON) ## Compile all GPU code, without a GPU, and check it for spills, stack frames and narrow memory accesses
	$(BIN)/python tools/gpu_gates/check_cuda.py
	$(BIN)/python tools/gpu_gates/check_triton.py
	PYTHONPATH=$(VENV)/triton-$(OLDER_TRITON) $(BIN)/python tools/gpu_gates/check_triton.py 80 90

.PHONY: gpu-bundle gpu-merge
gpu-bundle: $(VENV)/.torch ## Compile here for a machine with a GPU, into gpu-bundle/ (ARCHITECTURES=90: only for that one)
	GRADSTAT_CUDA_ARCHITECTURES="$(ARCHITECTURES)" $(BIN)/python benchmarks/gpu.py bundle

gpu: ## Run everything that needs a GPU, with the system's Python and torch: test, sanitize, measure (time limits: seven minutes)
	$(PYTHON) benchmarks/gpu.py run

gpu-merge: $(VENV)/.for-plots $(BUILT) ## Merge rows of GPU runs (FOLDER=gpu-results) into benchmarks/results, redraw charts and rewrite tables
	$(BIN)/python benchmarks/gpu.py merge --results $(or $(FOLDER),gpu-results)
	$(BIN)/python benchmarks/plots.py
	$(BIN)/python benchmarks/render.py --write

leaks: $(VENV)/.for-test $(BUILT) ## Take ten thousand steps of every kind and check that memory does not grow
	$(BIN)/python tools/leaks.py $(RECORD)

fields: ## Render csrc/stat_fields.def from gradstat/_fields.py
	$(PYTHON) tools/fields.py --write

clean: ## Remove all build outputs and the virtual environment
	rm -rf $(VENV) $(VENV)-frameworks build dist gpu-bundle demo-output *.egg-info gradstat/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	$(call say,A virtual environment in $(VENV); ten seconds)
	$(PYTHON) -m venv $(VENV)

# --no-compile: modules are compiled on first import, and most are never imported.
$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	$(call say,PyTorch and what builds need; a minute and its download)
	$(BIN)/python -m pip install --no-compile -c constraints.txt torch numpy "setuptools>=77" wheel
	touch $@

# Installs an extra of pyproject.toml, without compiling, which the .built stamps do.
$(VENV)/.for-%: $(VENV)/.torch pyproject.toml
	$(call say,gradstat from this folder and what its extra [$*] needs; up to a minute and its downloads)
	GRADSTAT_COMPILE=0 $(BIN)/python -m pip install --no-compile -c constraints.txt --no-build-isolation -e ".[$*]"
	touch $@

$(VENV)/.triton-%: $(VENV)/.torch
	$(BIN)/python -m pip install --no-compile --quiet --no-deps --upgrade --target $(VENV)/triton-$* triton==$*
	touch $@

# Incremental: does nothing unless a source is newer than the library.
$(VENV)/.built-cpu: $(VENV)/.torch $(SOURCES)
	$(call say,The C++ code; a minute)
	GRADSTAT_CUDA=0 $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	$(call say,The C++ code and (if there is nvcc) CUDA code for $(ARCHITECTURES_HERE); two minutes)
	GRADSTAT_CUDA_ARCHITECTURES="$(ARCHITECTURES_HERE)" $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/.built-all: $(VENV)/.torch $(SOURCES)
	$(call say,The C++ code and CUDA code for all architectures; five minutes)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
