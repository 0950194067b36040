# The two commands that matter: `make train` and `make test`. Both set up .venv on first use and work offline after that.

PYTHON ?= python3
EXP ?= quickstart
ARGS ?=
WHAT ?= train
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help train sweep scaling report inspect draw cost evaluate harness generate show plan pod-sim pod-train slurm-train gke-train sky-train test test-thorough test-faults fuzz test-all aot parity lint format bench clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14
	@echo 'Experiments: $(patsubst experiments/%.py,%,$(wildcard experiments/[a-z]*.py))'

train: .venv/ready     ## train or resume an experiment: EXP=shakespeare_char ARGS="--data.path=... --steps=500"
	@$(BIN)/python -m jaxformer train $(EXP) $(ARGS)

sweep: .venv/ready     ## train every combination of options: EXP=quickstart GRID="--optimizer.learning-rate=1e-4,3e-4 --seed=0,1"
	@$(BIN)/python -m experiments.launch.sweep $(EXP) --grid '$(GRID)' $(ARGS)

harness: .venv/ready   ## tasks of lm-evaluation-harness on a run: EXP=quickstart TASKS=arc_easy (pip install 'jaxformer[harness]')
	@$(BIN)/python -m jaxformer harness $(EXP) --tasks '$(TASKS)' $(ARGS)

scaling: .venv/ready   ## a grid of small runs and the law of their losses: EXP=quickstart SIZES="--model.d-model=32,64,128" STEPS=200,400,800
	@$(BIN)/python -m experiments.launch.scaling $(EXP) $(if $(SIZES),--sizes '$(SIZES)') $(if $(STEPS),--steps $(STEPS)) $(ARGS)

report: .venv/ready    ## one HTML page of a run, or of several side by side: EXP=reverse, or RUNS="runs/a runs/b"
	@$(BIN)/python -m jaxformer report $(or $(RUNS),$(EXP)) $(ARGS)

inspect: .venv/ready   ## losses, predictions and heads of a run, token by token: EXP=quickstart ARGS="--prompt 'def f(x):' --html page.html"
	@$(BIN)/python -m jaxformer inspect $(EXP) $(ARGS)

draw: .venv/ready      ## one HTML page of a model, with its architecture, masks and costs: EXP=gpt2_small
	@$(BIN)/python -m jaxformer draw $(EXP) $(ARGS)

cost: .venv/ready      ## parameters, FLOPs and bytes of a model, part by part: EXP=gpt2_small ARGS="--length 8192"
	@$(BIN)/python -m jaxformer cost $(EXP) $(ARGS)

evaluate: .venv/ready  ## score a run on its validation split: EXP=quickstart, or a run folder
	@$(BIN)/python -m jaxformer evaluate $(EXP) $(ARGS)

generate: .venv/ready  ## continue a text: EXP=quickstart ARGS="--prompt 'def main('"
	@$(BIN)/python -m jaxformer generate $(EXP) $(ARGS)

show: .venv/ready      ## the final config of an experiment or preset, its parameters and cost
	@$(BIN)/python -m jaxformer show $(EXP) $(ARGS)

GPU := $(filter a100:% h100:% h200:% b200:%,$(TOPOLOGY))
plan: .venv-plan/ready$(if $(GPU),-gpu)  ## a step compiled for a pod that is not here: EXP=llama_7b TOPOLOGY=v5e:16x16 [SEARCH=1 or DECODE=1]
	@.venv-plan/bin/python -m jaxformer plan $(EXP) --topology $(or $(TOPOLOGY),v5e:2x2) $(if $(SEARCH),--search) $(if $(DECODE),--decode) $(ARGS)

# launching: what is given on the command line becomes options; DRY=1 prints what would run
given = $(foreach name,$(1),$(if $($(name)),--$(shell echo $(name) | tr A-Z a-z)='$($(name))'))
launch = @$(BIN)/python -m experiments.launch.$(1) $(EXP) $(if $(DRY),--dry) $(call given,$(2)) $(3) -- $(ARGS)

pod-train: .venv/ready   ## train on a TPU VM or pod: EXP=gpt2_small TPU=my-pod ZONE=us-east5-a TOPOLOGY=v5e:4x4 BUCKET=b [SPOT=1] [DRY=1]
	$(call launch,tpu_vm,TPU ZONE PROJECT TOPOLOGY BUCKET RUNS RETRIES,$(if $(SPOT),--spot))

slurm-train: .venv/ready ## submit a Slurm job: EXP=gpt2_small NODES=4 GPUS=8 RUNS=/shared/runs [PARTITION=] [TIME=] [DRY=1]
	$(call launch,slurm,NODES GPUS CPUS TIME PARTITION ACCOUNT RUNS RETRIES)

gke-train: .venv/ready   ## submit a GKE JobSet: EXP=gpt2_small TOPOLOGY=v5e:4x4 IMAGE=... BUCKET=b [SLICES=2] [DRY=1]
	$(call launch,gke,TOPOLOGY SLICES IMAGE BUCKET CLAIM ACCOUNT RETRIES,$(if $(SPOT),--spot))

sky-train: .venv/ready   ## submit a SkyPilot managed job: EXP=gpt2_small TOPOLOGY=v5e:4x4 BUCKET=gs://b, or GPUS=H100:8 NODES=4 [DRY=1]
	$(call launch,skypilot,TOPOLOGY NODES BUCKET RETRIES,$(if $(GPUS),--accelerators='$(GPUS)'))

N ?= 2
pod-sim: .venv/ready     ## N real processes of one run on this machine: N=4 EXP=quickstart ARGS="--steps=60"
	@$(BIN)/python -m experiments.launch.pod_sim $(N) $(EXP) $(ARGS)

test: .venv/ready-dev  ## the test suite (some minutes on two cores)
	@$(BIN)/python -m pytest -n 2 $(ARGS)

test-thorough: .venv/ready-dev  ## the tests that take some seconds each (CI runs them too)
	@$(BIN)/python -m pytest -n 2 -m 'thorough and not slow and not fault and not parity and not gpu and not tpu and not aot' $(ARGS)

test-all: .venv/ready-dev  ## also the slow tests and those that kill, corrupt and fill things
	@$(BIN)/python -m pytest -n 2 -m 'not parity and not gpu and not tpu and not aot' $(ARGS)

test-faults: .venv/ready-dev  ## real runs killed, damaged, cut off and filled up; the report is dist/faults.md (some two hours)
	@$(BIN)/python -m pytest -m 'fault or not fault' $(ARGS) tests/faults

SECONDS ?= 60
fuzz: .venv/ready-dev  ## every parser under atheris: SECONDS=60 for each
	@$(BIN)/pip install -q --group fuzz
	@$(BIN)/python tests/faults/fuzz.py $(SECONDS) $(ARGS)

aot: .venv-plan/ready-dev  ## the tests that compile for TPUs that are not here (installs the TPU compiler)
	@JAX_PLATFORMS=cpu .venv-plan/bin/python -m pytest -m aot $(ARGS)

parity: .venv-parity/ready  ## other people's packages run live against tests/fixtures (installs torch for CPU, transformers and others)
	@.venv-parity/bin/python -m pytest -m parity $(ARGS)

.PHONY: docs
docs: .venv/ready-docs ## the book, every block and notebook executed: dist/site/index.html
	@$(BIN)/python -m pytest -q -n 2 -m 'not parity' tests/test_docs.py tests/test_mathematics.py
	@NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --quiet --strict -f docs/site/mkdocs.yml
	@echo 'the book: dist/site/index.html'

lint: .venv/ready-dev  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check

format: .venv/ready-dev  ## rewrite to the style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: .venv/ready     ## our speed beside a named peer's: WHAT=train (installs a CPU build of torch into .venv-bench)
	@$(BIN)/python -m experiments.bench.$(WHAT) $(ARGS)

clean:           ## removes .venv and caches; runs/ stays
	rm -rf .venv .venv-bench .venv-parity .venv-plan .pytest_cache .hypothesis .ruff_cache

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxformer needs Python 3.11 or newer; set PYTHON=")'
	@echo 'setting up .venv (once, about a minute)'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --upgrade 'pip>=25.1'
	@touch $@

.venv/ready: pyproject.toml | .venv/made
	@$(BIN)/pip install -q -e .
	@touch $@

.venv/ready-dev: .venv/ready
	@$(BIN)/pip install -q -e . --group dev
	@touch $@

.venv/ready-docs: .venv/ready-dev
	@$(BIN)/pip install -q -e . --group docs
	@touch $@

.venv-parity/ready: pyproject.toml
	@echo 'setting up .venv-parity (once, some minutes)'
	@$(PYTHON) -m venv .venv-parity
	@.venv-parity/bin/pip install -q --upgrade 'pip>=25.1'
	@.venv-parity/bin/pip install -q torch==2.13.0
	@.venv-parity/bin/pip install -q -e . --group dev --group parity
	@.venv-parity/bin/pip install -q --no-deps mup==1.0.0  # its other requirements are for plots
	@touch $@

.venv-plan/ready: pyproject.toml
	@echo 'setting up .venv-plan with the TPU compiler (once, some minutes, 1.5 GB)'
	@$(PYTHON) -m venv .venv-plan
	@.venv-plan/bin/pip install -q --upgrade 'pip>=25.1'
	@.venv-plan/bin/pip install -q -e '.[tpu]' 'jax==0.10.2'
	@touch $@

.venv-plan/ready-dev: .venv-plan/ready
	@.venv-plan/bin/pip install -q -e . --group dev
	@touch $@

.venv-plan/ready-gpu: .venv-plan/ready
	@.venv-plan/bin/pip install -q -e '.[plan-gpu]'
	@touch $@
