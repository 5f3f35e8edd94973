# Everything a newcomer needs: `make demo` and `make test` work from a fresh clone with Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One worker more than there are cores, because many tests wait for processes; four at most. Files are distributed in their order: sorted by
# their number of tests, files with few but long tests would come last.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 3 ? cores + 1 : 4)))
# As in pyproject.toml, whose marks have targets of their own.
SELECT := not slow and not fault_matrix and not sb3 and not trl
export WANDB_SILENT ?= true
# Tests start hundreds of processes: where an image forbids bytecode, each of them would compile the package and its tests again.
export PYTHONDONTWRITEBYTECODE :=
ACTIVATE := echo "so that this shell finds these commands: source $(BIN)/activate"
DEMO_SINKS := --sink console --sink tensorboard --sink 'wandb:esper-demo?mode=offline' --sink 'mlflow?experiment=esper-demo'

.PHONY: help install demo demo-mlp demo-fault test test-all pytest test-adapters test-verl test-slow test-faults lint bench docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv with the package, every backend and the development tools

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install  ## train an LSTM on CartPole-v1 without velocities; telemetry on the console, in TensorBoard, W&B (offline) and MLflow
	@echo "Training an LSTM on CartPole-v1 without velocities, with telemetry in four places; the end says how to open each"
	@$(BIN)/esper-telemetry train --env CartPole-v1 --mask-velocity --policy lstm --num-envs 64 --num-steps 64 --total-steps 100000 --seed 1 $(DEMO_SINKS)
	@$(ACTIVATE)

demo-mlp: install  ## the same with velocities, for which a policy without memory is enough
	@echo "Training an MLP on CartPole-v1 with telemetry in four places; the end says how to open each"
	@$(BIN)/esper-telemetry train --env CartPole-v1 --total-steps 200000 --seed 1 $(DEMO_SINKS)
	@$(ACTIVATE)

demo-fault: install  ## the demo, with a learning rate 100 times too large in its second half, and the alarms that this raises
	@echo "Training as in the demo; half-way the learning rate becomes 100 times too large, and the console says what is wrong"
	@$(BIN)/python -m esper_telemetry.lab.faults demo --fault lr_x100 $(DEMO_SINKS)
	@$(ACTIVATE)

test: install  ## lint, check types and run the quick tests (4 minutes on 2 cores)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest SELECT='not system and $(SELECT)'

test-all: install  ## the same with the system tests: processes, servers, browsers, longer trainings (18 minutes on 2 cores)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: install
	@echo "Running the tests"
	@$(BIN)/pytest -q -m '$(SELECT)' --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-adapters: install  ## the adapters against the real Stable-Baselines3, sb3-contrib, RSL-RL, TorchRL, skrl, rl_games, RLlib and TRL; installs them
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,rsl-rl,torchrl,skrl,rl-games,rllib,trl]'
	@echo "Running the tests of the adapters"
	@$(BIN)/pytest -q -m "sb3 or trl" --numprocesses auto --maxprocesses 4

test-verl:  ## the adapter against the real verl, in .venv-verl, because verl needs other versions than the rest
	@test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	@.venv-verl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[verl,train,wandb,tensorboard,mlflow]' pytest hypothesis
	@.venv-verl/bin/pytest -q -m sb3 tests/adapters/test_verl.py tests/test_examples.py::test_verl_runner

test-slow: install  ## learning curves over five seeds, soak runs
	@echo "Running the slow tests: learning curves over five seeds"
	@$(BIN)/pytest -q -m slow -rP --show-capture=stdout --numprocesses auto --maxprocesses 4

test-faults: install  ## trainings under real faults (dead servers, full disks); writes docs/fault_matrix.md (15 minutes)
	@echo "Breaking servers, disks, clients and trainers, one at a time"
	@$(BIN)/pytest -q -m fault_matrix tests/fault_matrix

lint: install  ## ruff and mypy --strict on package, tests, examples and benchmarks
	@echo "Linting and checking types"
	@$(BIN)/ruff format --check --quiet . || (echo "run: $(BIN)/ruff format ." && false)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

bench: install  ## every figure of docs/benchmarks.md, side by side with other trainers and loggers where they are installed (90 minutes)
	@echo "Measuring (close other programs; CLEANRL=ppo.py and PUREJAXRL=DIR JAX_PYTHON=PYTHON add these trainers)"
	@$(BIN)/python benchmarks/trainer.py --num-envs 8 64 $(if $(CLEANRL),--cleanrl $(CLEANRL)) --save
	@$(BIN)/python benchmarks/trainer.py --num-envs 1024 --rounds 3 --save
	@$(BIN)/python benchmarks/trainer.py --lstm 64 256 --only "esper, one LSTM" rsl_rl --rounds 3 --save
	@$(BIN)/python benchmarks/trainer.py --lstm 64 256 --only "esper, one LSTM" sb3 --steps 8192 --rounds 3 --save
	@$(if $(PUREJAXRL),$(BIN)/python benchmarks/trainer.py --purejaxrl $(PUREJAXRL) --jax-python $(JAX_PYTHON) \
		--only esper purejaxrl "purejaxrl, with compilation" --num-envs 8 1024 --rounds 3 --save)
	@$(BIN)/python benchmarks/durations.py phases
	@$(BIN)/python benchmarks/durations.py durations
	@$(BIN)/python benchmarks/overhead.py --save
	@$(BIN)/python benchmarks/adapters.py --save
	@$(BIN)/python benchmarks/device_calls.py --save
	@$(BIN)/python benchmarks/delivery.py --save
	@$(BIN)/python benchmarks/paced.py --save
	@$(BIN)/python benchmarks/script_runs.py --save
	@$(BIN)/python benchmarks/detection.py --updates 45 --rounds 10 --save
	@$(BIN)/python benchmarks/equation_cost.py --save

docs: install  ## write the generated pages from the declarations in the code, and the site to build/site; no network
	@$(BIN)/python docs/glossary.py
	@$(BIN)/python benchmarks/results.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "wrote build/site/index.html"

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis runs wandb
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
