# Every target sets itself up: `make demo` and `make test` work on a fresh clone (Linux, Python >= 3.11, make).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := .venv-kernels
NVCC = nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime
TORCH = torch==$$(sed -n 's/^torch==//p' constraints.txt)
# One thread a process: the tests and the demo run several processes on few cores (see docs/concepts/measuring.md).
export OMP_NUM_THREADS ?= 1
# Files of tests at a time, some 3 GiB each. One more than two cores: ranks that wait leave a core idle.
TESTERS ?= 3

.PHONY: help setup demo study faults pipeline-split plan-times test test-quick pins package check format plan-grid budget-grid plan-pages parity gpu gpu-kernels gpu-jet-nemotron clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ok  ## build .venv with pinned versions

# torch first and by its exact version: a resolver that meets it later as "any torch" may take another build.
$(VENV)/.ok: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# What compiles kernels, apart from transformers: triton in one environment with fla breaks fla's layers on a CPU, and
# PEFT imports a torchao that it finds, which prints lines in every process.
$(KERNELS)/.ok: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/pip install --quiet --constraint constraints.txt $(TORCH)
	$(KERNELS)/bin/pip install --quiet --constraint constraints.txt triton numpy pytest pytest-xdist hypothesis $(NVCC)
	$(KERNELS)/bin/pip install --quiet --constraint constraints.txt --no-deps torchao
	$(KERNELS)/bin/pip install --quiet --no-deps --editable .
	touch $@

demo: setup  ## train a small hybrid model, then LoRA-tune it under nine strategies; writes a page that compares them
	$(BIN)/python examples/demo.py $(MODEL)

study: setup  ## compare the strategies fairly, in rounds; goes on where it stopped
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	$(BIN)/shardwise bench configs/study-cpu.yaml --out runs/study-cpu
	$(BIN)/shardwise report runs/study-cpu

pipeline-split: setup  ## what pipelines gain that are cut by measured cost: rounds, charts, a table (about 15 idle minutes)
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	$(BIN)/python tools/pipeline_split.py

plan-times: setup  ## predicted step times beside measured ones, on this machine as calibrated (about 12 idle minutes)
	test -d runs/corpus || $(BIN)/python examples/corpus.py
	OMP_NUM_THREADS=1 $(BIN)/python tools/plan_times.py

PYTEST = $(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile --no-loadscope-reorder

test: setup $(KERNELS)/.ok  ## the tests, in minutes on two cores; prints what they cost by folder
	$(PYTEST)
	$(KERNELS)/bin/python -m pytest --numprocesses $(TESTERS) tests/kernels/without_gpu

test-quick: setup  ## for while one works: what neither trains nor starts commands, and a parity cell per strategy
	SHARDWISE_QUICK=1 $(PYTEST)

pins: setup  ## tests of what libraries do, which `make test` runs when a library changes; writes tests/pins.json
	$(BIN)/python -m tests.left_out

package: setup  ## build a wheel, install it into a fresh environment and train with it; checks the recipes' page
	.ci/package $(BIN)/python
	$(BIN)/python tools/recipes.py --check

check: setup  ## lint, format, types, architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src
	$(BIN)/python -m pytest tests/test_architecture.py

format: setup  ## rewrite the code as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

plan-grid: setup  ## memory peaks that the planner predicts beside measured ones, 156 small runs; resumable; writes results/plan/
	$(BIN)/python -m tools.plan_grid

budget-grid: setup  ## what budgets of memory choose to compute again, measured on 24 small models; resumable; writes results/plan/budgets.json
	$(BIN)/python -m tools.budget_grid

plan-pages: setup  ## the tables of "What do I need?" and "Published layouts", from the planner (some minutes)
	$(BIN)/python tools/plan_pages.py

parity: setup  ## every family x layout x mode against one process; resumable; writes results/parity.json and its page
	$(BIN)/python -m tests.parity
	$(BIN)/python tools/compatibility.py
	$(PYTEST) -m slow
	$(BIN)/python -m tests.left_out

faults: setup  ## some 380 faults injected into small runs (about an hour); resumable; writes results/faults.json and .md
	$(BIN)/python -m tests.faults

test-clusters: setup  ## runs on a Slurm of two nodes on this machine, which root starts from the packages slurmctld, slurmd
	$(BIN)/python -m pytest -m cluster tests/clusters

gpu:  ## tests and timings on a CUDA device; PYTHON= names an interpreter that has torch; installs nothing
	$(PYTHON) -m tests.gpu

gpu-kernels:  ## LoRA and loss kernels timed on a CUDA device, and LoRA steps with them; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.kernels_bench

gpu-jet-nemotron:  ## LoRA steps of Jet-Nemotron-2B's shape timed on a CUDA device; PYTHON= as for `make gpu`
	$(PYTHON) -m tests.gpu.jet_nemotron

clean:  ## remove what the targets made
	rm -rf $(VENV) $(KERNELS) runs build .pytest_cache .ruff_cache .hypothesis
