# The two commands that matter: `make train` and `make test`. Both set up .venv on first use and work offline after that.

# the first of these Pythons that is at hand and can make environments, those of pyenv included
find-python = $(shell for version in $(1); do \
  for python in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python$$version; do \
    "$$python" -c 'import ensurepip, venv' 2>/dev/null && echo "$$python" && exit; done; done; echo python3)
NEWEST_PYTHON = $(call find-python,3.14 3.13 3.12 3.11)
OLDEST_PYTHON = $(call find-python,3.11 3.12 3.13 3.14)
# OLDEST=1 is another environment, .venv-oldest: the oldest Python, and every package at its lower bound
PYTHON ?= $(if $(OLDEST),$(OLDEST_PYTHON),$(NEWEST_PYTHON))
EXP ?= quickstart
ARGS ?=
WHAT ?= train
# JAX=0.11.* is another environment, .venv-jax-0.11, with that version
VENV := .venv$(if $(OLDEST),-oldest)$(addprefix -jax-,$(subst .*,,$(JAX)))
PIN := $(if $(JAX),'jax==$(JAX)') $(if $(OLDEST),-c $(VENV)/bounds.txt)
BIN := $(VENV)/bin
# pip compiles no module: each is compiled when it is first imported, and most never are. That was 0.7 of pip's time.
# Where Python may not write what it compiles, each start would compile again: then pip does it.
export PIP_COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),1,0)
# what is given on the command line is no text of make's: a $ in it stays one
GIVEN := EXP ARGS GRID TASKS SIZES STEPS RUNS TOPOLOGY TPU ZONE PROJECT BUCKET RETRIES NODES GPUS CPUS TIME PARTITION ACCOUNT SLICES IMAGE CLAIM
$(foreach name,$(GIVEN),$(if $(value $(name)),$(eval override $(name) := $$(value $(name)))))
# a variable as one word of the shell, whatever quotes and spaces it has; ARGS is shell text, words with their quotes
quote = '$(subst ','\'',$(1))'

.DEFAULT_GOAL := help
.PHONY: help train chat-all gallery tokens sweep scaling report inspect draw cost families env evaluate export harness generate show plan pod-sim pod-train image slurm-train gke-train sky-train test test-thorough test-faults fuzz test-all aot parity lint format bench check-gpu wheels-gpu python clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14
	@echo 'Experiments: $(filter-out one_file,$(patsubst experiments/%.py,%,$(wildcard experiments/[a-z]*.py)))'

train: $(VENV)/ready     ## train or resume an experiment: EXP=shakespeare_char ARGS="--data.path=... --steps=500"
	@$(BIN)/python -m jaxformer train $(call quote,$(EXP)) $(ARGS)

chat-all: $(VENV)/ready  ## the four stages of chat in a row, and a table of what each added (25 to 40 minutes on 2 cores): ARGS="--seed=1"
	@for stage in base sft dpo grpo; do $(BIN)/python -m jaxformer train chat/$$stage $(ARGS) || exit; done
	@$(BIN)/python -m experiments.chat._table

gallery: $(VENV)/ready   ## train every application, some with several seeds, and write docs/gallery.md (1.6 hours of one core a seed): SEEDS="0 1 2"
	@for name in $$($(BIN)/python -m experiments._gallery --names); do for seed in $(or $(SEEDS),0); do \
	  $(BIN)/python -m jaxformer train $$name --seed=$$seed $(ARGS) || exit; done; done
	@$(BIN)/python -m experiments._gallery

tokens: $(VENV)/ready    ## encode an experiment's texts ahead of its training: EXP=gpt2_small ARGS="--data.path=texts/"
	@$(BIN)/python -m jaxformer tokens $(call quote,$(EXP)) $(ARGS)

sweep: $(VENV)/ready     ## train every combination of options: EXP=quickstart GRID="--optimizer.learning-rate=1e-4,3e-4 --seed=0,1"
	@$(BIN)/python -m jaxformer sweep $(call quote,$(EXP)) --grid $(call quote,$(GRID)) $(ARGS)

harness: $(VENV)/ready   ## tasks of lm-evaluation-harness on a run: EXP=quickstart TASKS=arc_easy (pip install 'jaxformer[harness]')
	@$(BIN)/python -m jaxformer harness $(call quote,$(EXP)) --tasks $(call quote,$(TASKS)) $(ARGS)

scaling: $(VENV)/ready   ## a grid of small runs and the law of their losses: EXP=quickstart SIZES="--model.d-model=32,64,128" STEPS=200,400,800
	@$(BIN)/python -m experiments.launch.scaling $(call quote,$(EXP)) $(if $(SIZES),--sizes $(call quote,$(SIZES))) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

report: $(VENV)/ready    ## one HTML page of a run, or of several side by side: EXP=reverse, or RUNS="runs/a runs/b"
	@$(BIN)/python -m jaxformer report $(or $(RUNS),$(call quote,$(EXP))) $(ARGS)

inspect: $(VENV)/ready   ## losses, predictions and heads of a run, token by token: EXP=quickstart ARGS="--prompt 'def f(x):' --html page.html"
	@$(BIN)/python -m jaxformer inspect $(call quote,$(EXP)) $(ARGS)

draw: $(VENV)/ready      ## one HTML page of a model, with its architecture, masks and costs: EXP=gpt2_small
	@$(BIN)/python -m jaxformer draw $(call quote,$(EXP)) $(ARGS)

families: $(VENV)/ready  ## the model types of Hugging Face that load, with their presets, and what is refused
	@$(BIN)/python -m jaxformer.families.table

cost: $(VENV)/ready      ## parameters, FLOPs and bytes of a model, part by part: EXP=gpt2_small ARGS="--length 8192"
	@$(BIN)/python -m jaxformer cost $(call quote,$(EXP)) $(ARGS)

evaluate: $(VENV)/ready  ## score a run on its validation split: EXP=quickstart, or a run folder
	@$(BIN)/python -m jaxformer evaluate $(call quote,$(EXP)) $(ARGS)

env: $(VENV)/ready       ## versions, devices, and which optional parts work
	@$(BIN)/python -m jaxformer env

export: $(VENV)/ready    ## a run as a folder that transformers opens: EXP=shakespeare_char TO=exported ARGS=--dtype=bfloat16
	@$(BIN)/python -m jaxformer export $(call quote,$(EXP)) $(call quote,$(TO)) $(ARGS)

generate: $(VENV)/ready  ## continue a text: EXP=quickstart ARGS="--prompt 'def main('"
	@$(BIN)/python -m jaxformer generate $(call quote,$(EXP)) $(ARGS)

show: $(VENV)/ready      ## the final config of an experiment or preset, its parameters and cost
	@$(BIN)/python -m jaxformer show $(call quote,$(EXP)) $(ARGS)

GPU := $(filter a100:% h100:% h200:% b200:%,$(TOPOLOGY))
plan: .venv-plan/ready$(if $(GPU),-gpu)  ## a step compiled for a pod that is not here: EXP=llama_7b TOPOLOGY=v5e:16x16 [SEARCH=1 or DECODE=1]
	@.venv-plan/bin/python -m jaxformer plan $(call quote,$(EXP)) --topology $(call quote,$(or $(TOPOLOGY),v5e:1x1)) $(if $(SEARCH),--search) $(if $(DECODE),--decode) $(ARGS)

# launching: what is given on the command line becomes options; DRY=1 prints what would run
given = $(foreach name,$(1),$(if $($(name)),--$(shell echo $(name) | tr A-Z a-z)=$(call quote,$($(name)))))
launch = @$(BIN)/python -m experiments.launch.$(1) $(call quote,$(EXP)) $(if $(DRY),--dry) $(call given,$(2)) $(3) -- $(ARGS)

pod-train: $(VENV)/ready   ## train on a TPU VM or pod: EXP=quickstart TPU=my-pod ZONE=us-east5-a TOPOLOGY=v5e:4x4 BUCKET=my-bucket ARGS="--mesh.data=-1" [SPOT=1] [DRY=1]
	$(call launch,tpu_vm,TPU ZONE PROJECT TOPOLOGY BUCKET RUNS RETRIES,$(if $(SPOT),--spot))

CUDA := $(if $(DRY),,$(if $(filter 0,$(GPUS)),$(VENV)/ready-hosts,.venv-cuda/ready))
slurm-train: $(VENV)/ready $(CUDA) ## submit a Slurm job: EXP=quickstart NODES=2 GPUS=8 RUNS=/shared/runs ARGS="--mesh.data=-1" [PARTITION=] [TIME=] [DRY=1]
	$(call launch,slurm,NODES GPUS CPUS TIME PARTITION ACCOUNT RUNS RETRIES)

image: $(VENV)/ready       ## build and push the image of gke-train, with the versions of .venv: IMAGE=us-docker.pkg.dev/my/repo/jaxformer:1
	@$(BIN)/python -m experiments.launch.lock
	docker build -f experiments/launch/Dockerfile -t $(call quote,$(IMAGE)) --build-arg PYTHON=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])') .
	docker push $(call quote,$(IMAGE))

gke-train: $(VENV)/ready   ## submit a GKE JobSet: EXP=quickstart TOPOLOGY=v5e:4x4 IMAGE=... BUCKET=my-bucket ARGS="--mesh.data=-1" [SLICES=2] [DRY=1]
	$(call launch,gke,TOPOLOGY SLICES IMAGE BUCKET CLAIM ACCOUNT RETRIES,$(if $(SPOT),--spot))

sky-train: $(VENV)/ready   ## submit a SkyPilot managed job: EXP=quickstart TOPOLOGY=v5e:4x4 BUCKET=gs://my-bucket ARGS="--mesh.data=-1", or GPUS=H100:8 NODES=2 [DRY=1]
	$(call launch,skypilot,TOPOLOGY NODES BUCKET RETRIES,$(if $(GPUS),--accelerators=$(call quote,$(GPUS))))

N ?= 2
pod-sim: $(VENV)/ready     ## N real processes of one run on this machine: N=4 EXP=quickstart ARGS="--steps=60"
	@$(BIN)/python -m experiments.launch.pod_sim $(N) $(call quote,$(EXP)) $(ARGS)

test: $(VENV)/ready-dev  ## the test suite (some minutes on two cores); OLDEST=1: on the oldest Python and packages
	@$(BIN)/python -m pytest -n 2 $(ARGS)

test-thorough: $(VENV)/ready-dev  ## the tests that take some seconds each (CI runs one part of eighteen a change)
	@$(BIN)/python -m pytest -n 2 -m 'thorough and not slow and not fault and not parity and not gpu and not tpu and not aot' $(ARGS)

test-all: $(VENV)/ready-dev  ## also the slow tests and those that kill, corrupt and fill things
	@$(BIN)/python -m pytest -n 2 -m 'not parity and not gpu and not tpu and not aot' $(ARGS)

test-faults: $(VENV)/ready-dev  ## real runs killed, damaged, cut off and filled up; the report is dist/faults.md (some two hours)
	@$(BIN)/python -m pytest -m 'fault or not fault' $(ARGS) tests/faults

SECONDS ?= 60
fuzz: $(VENV)/ready-dev  ## every parser under atheris: SECONDS=60 for each
	@$(BIN)/pip install -q --group fuzz
	@$(BIN)/python tests/faults/fuzz.py $(SECONDS) $(ARGS)

aot: .venv-plan/ready-dev  ## the tests that compile for TPUs that are not here (installs the TPU compiler)
	@JAX_PLATFORMS=cpu .venv-plan/bin/python -m pytest -m aot $(ARGS)

parity: .venv-parity/ready  ## other people's packages run live against tests/fixtures (installs torch for CPU, transformers and others)
	@.venv-parity/bin/python -m pytest -m parity $(ARGS)

.PHONY: docs
docs: $(VENV)/ready-docs ## the book, every block and notebook executed: dist/site/index.html
	@$(BIN)/python -m pytest -q -n 2 -m 'not parity' tests/test_docs.py tests/test_mathematics.py tests/test_book.py
	@NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --quiet --strict -f docs/site/mkdocs.yml
	@echo 'the book: dist/site/index.html'

lint: $(VENV)/ready-dev  ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check

format: $(VENV)/ready-dev  ## rewrite to the style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/ready     ## our speed beside a named peer's: WHAT=train (installs a CPU build of torch into .venv-bench)
	@BENCH_PYTHON=$(call quote,$(OLDEST_PYTHON)) $(BIN)/python -m experiments.bench.$(WHAT) $(ARGS)

check-gpu: $(VENV)/ready-dev  ## what one NVIDIA GPU shows, in eight minutes: tests, speed and memory beside torch; results in runs/check-gpu.jsonl
	@$(BIN)/python -m experiments.bench.gpu $(ARGS)

WHEELS := grain array_record portpicker beartype flax orbax-checkpoint tensorstore optax chex etils jaxtyping safetensors
# of the extra `kernels`, half of it xprof
ifdef KERNELS
WHEELS += tokamax einshape fire termcolor immutabledict pydantic pydantic-core annotated-types typing-inspection qwix treescope xprof
endif
wheels-gpu: $(VENV)/made  ## packages that check-gpu needs beside CUDA, jax, torch and pytest, for Python 3.12 without a network: dist/wheels/; KERNELS=1: tokamax, too
	@$(BIN)/pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $(foreach n,17 27 28,--platform manylinux_2_$(n)_x86_64) \
	  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d dist/wheels $(WHEELS)
	@du -sh dist/wheels

python:          ## the Python that environments are made with; OLDEST=1: that of .venv-oldest
	@$(call quote,$(PYTHON)) --version

clean:           ## removes .venv and caches; runs/ stays
	rm -rf .venv .venv-oldest .venv-bench .venv-parity .venv-plan .venv-cuda .venv-jax-* .pytest_cache .hypothesis .ruff_cache

$(VENV)/made:
	@$(call quote,$(PYTHON)) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxformer needs Python 3.11 or newer; set PYTHON=")'
	@echo "setting up $(VENV) with $$($(call quote,$(PYTHON)) --version) (once, about a minute)"
	@$(call quote,$(PYTHON)) -m venv $(VENV)
	@$(BIN)/pip install -q --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/ready: pyproject.toml | $(VENV)/made
	$(if $(OLDEST),@$(BIN)/python tests/oldest.py > $(VENV)/bounds.txt)
	@$(BIN)/pip install -q -e . $(PIN)
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	@$(BIN)/pip install -q -e . $(PIN) --group dev
	@touch $@

$(VENV)/ready-hosts: $(VENV)/ready
	@$(BIN)/pip install -q -e '.[hosts]' $(PIN)
	@$(BIN)/python -m compileall -q $(VENV)/lib > /dev/null || true  # hosts may not write there
	@touch $@

.venv-cuda/ready: export PIP_COMPILE := 1

# what Slurm's GPU nodes run, in the versions of .venv: made where there is a network
.venv-cuda/ready: pyproject.toml | $(VENV)/ready
	@echo 'setting up .venv-cuda with CUDA (once, some minutes, 5 GB)'
	@$(BIN)/python -m experiments.launch.lock
	@$(BIN)/python -m venv .venv-cuda
	@.venv-cuda/bin/pip install -q --upgrade 'pip>=25.1'
	@.venv-cuda/bin/pip install -q -c dist/constraints.txt -e '.[cuda,hosts]'
	@touch $@

$(VENV)/ready-docs: $(VENV)/ready-dev
	@$(BIN)/pip install -q -e . --group docs
	@touch $@

# the witnesses' packages, torch for CPUs among them, are had for the oldest Python first
.venv-parity/ready: pyproject.toml
	@echo 'setting up .venv-parity (once, some minutes)'
	@$(call quote,$(OLDEST_PYTHON)) -m venv .venv-parity
	@.venv-parity/bin/pip install -q --upgrade 'pip>=25.1'
	@.venv-parity/bin/pip install -q torch==2.13.0
	@.venv-parity/bin/pip install -q -e . --group dev --group parity
	@.venv-parity/bin/pip install -q --no-deps mup==1.0.0  # its other requirements are for plots
	@touch $@

.venv-plan/ready: pyproject.toml
	@echo 'setting up .venv-plan with the TPU compiler (once, some minutes, 1.5 GB)'
	@$(call quote,$(PYTHON)) -m venv .venv-plan
	@.venv-plan/bin/pip install -q --upgrade 'pip>=25.1'
	@.venv-plan/bin/pip install -q -e '.[tpu,kernels,text]' $(PIN)
	@touch $@

.venv-plan/ready-dev: .venv-plan/ready
	@.venv-plan/bin/pip install -q -e . --group dev
	@touch $@

.venv-plan/ready-gpu: .venv-plan/ready
	@.venv-plan/bin/pip install -q -e '.[plan-gpu]'
	@touch $@
