# Every target first brings .venv up to date; that takes two minutes once and a moment afterwards. Those with tests also bring up to
# date what only tests need.
# Not called PYTHON: that one of the environment is for ci/setup, and make would replace it.
PY := .venv/bin/python
PYTEST := $(PY) -m pytest --durations=15
# Tests start hundreds of processes: each would compile what it imports of this clone if the shell forbids to keep that.
export PYTHONDONTWRITEBYTECODE :=
# Tests that mostly compute: one for each of two cores. The others mostly wait, for deadlines and processes, and run four
# at a time; to import and collect takes each worker 14 s of a core. Tests marked `quiet` measure time, and run alone.
# Files are taken in this order: a worker that began a long one last would be alone with it. Threads of torch would wait
# for each other in loops, on cores that other workers need.
COMPUTING := tests/emulator tests/kernels tests/codec tests/kv tests/memory tests/pages tests/plan tests/protocol \
	$(addprefix tests/scheduler_plugins/,admission cost middleware order planner profile qos queue sim vllm)
QUIET = $(shell grep -rl "pytest.mark.quiet" tests --include="test_*.py")

# Parts run one after the other also with -j: each uses all processors.
.NOTPARALLEL:
.PHONY: setup setup-tests demo doctor lint docs dist fast beside computing waiting quiet sglang-door newest-vllm engine states ray test clean

# What takes minutes ends with make, also where make is killed: no process stays.
ENDS_WITH_MAKE := $(if $(shell command -v setpriv),setpriv --pdeathsig TERM)

setup:
	@$(ENDS_WITH_MAKE) ci/setup

setup-tests: setup
	@$(ENDS_WITH_MAKE) ci/setup-tests

demo: setup
	@$(ENDS_WITH_MAKE) .venv/bin/pd-connector demo

doctor: setup
	@.venv/bin/pd-connector doctor

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@ci/beside '$(PY) -m mypy' '.venv/bin/lint-imports --no-logo --no-cache && $(PY) ci/words && ci/docs'

# The door to SGLang is tested with SGLang, which has an environment of its own.
SGLANG := .venv-sglang/bin/python

# A test whose deadlines are part of what it shows gets the machine to itself and its likes: what computes runs beside the
# doors, which mostly wait for processes to start, and the waiting half after it.
# `make -k fast` runs all three parts whatever fails, and then fails.
BESIDE := sglang-door
fast: beside waiting quiet

beside: setup-tests
	@ci/beside '$(MAKE) --no-print-directory computing' '$(MAKE) --no-print-directory -k $(BESIDE)'

computing: setup-tests
	OMP_NUM_THREADS=1 $(PYTEST) -m "not engine and not quiet" --timeout=600 -n 2 --dist loadfile --no-loadscope-reorder $(COMPUTING)

waiting: setup-tests
	OMP_NUM_THREADS=1 $(PYTEST) -m "not engine and not quiet" --timeout=300 -n 4 --dist loadfile $(COMPUTING:%=--ignore=%)

quiet: setup-tests
	$(PYTEST) -m quiet --timeout=300 $(QUIET)

sglang-door: setup-tests
	@if [ -e .venv-sglang/.setup-done ]; then $(SGLANG) -m pytest --durations=15 tests/sglang_door --timeout=300; \
		else echo "SKIPPED: tests/sglang_door (read .venv-sglang/setup.log, run ci/setup-sglang)"; fi

# Engines mostly start and wait: two files at a time, each worker with a pair and a reference of its own (the folders'
# conftest.py say how).
engine: setup-tests newest-vllm
	$(PYTEST) --timeout=900 -n 2 --dist loadfile --no-loadscope-reorder tests/engines
	$(PYTEST) --timeout=900 -n 2 --dist loadfile --no-loadscope-reorder tests/sglang_engines

# Models with recurrent states between unlike engines, and controls that must be seen (docs/models.md): half an hour.
STATES := all
states: setup-tests
	PD_STATES="$(STATES)" $(PYTEST) --timeout=900 tests/engines/test_states.py tests/engines/test_states_matrix.py

# `waiting` tests the doors to vLLM with the version in .venv, this with the newest.
NEWEST := .venv/vllm-0.33
newest-vllm: setup-tests
	@if [ -e $(NEWEST)/.setup-done ]; then PYTHONPATH=$(CURDIR)/$(NEWEST) VLLM_CACHE_ROOT=$(CURDIR)/$(NEWEST)/.cache OMP_NUM_THREADS=1 $(PYTEST) --timeout=300 -n 2 tests/vllm tests/scheduler_plugins/vllm; \
		else echo "SKIPPED: tests/vllm with vLLM 0.33 (read $(NEWEST).log, run ci/setup-vllm33)"; fi

# The door to Ray is tested in an environment of its own, too, which is laid over .venv.
RAY := .venv-ray/bin/python

ray: setup-tests
	@if [ -e .venv-ray/.setup-done ]; then $(RAY) -m pytest --durations=15 tests/ray_door --timeout=600; \
		else echo "SKIPPED: tests/ray_door (read .venv-ray/setup.log, run ci/setup-ray)"; fi

# In this order, so that the cheapest mistakes show first; a failure ends the run, but `fast` shows all of its. Ray's tests wait for
# actors and engines to start, and have time for that beside the tests that compute. `lint` computes while others download.
test: setup
	@ci/beside '$(MAKE) --no-print-directory lint' '$(MAKE) --no-print-directory setup-tests'
	@$(MAKE) --no-print-directory -k fast BESIDE="sglang-door ray"
	@$(MAKE) --no-print-directory engine

# The documentation as a site, in build/site.
docs: setup
	@ci/docs

# Wheel, source distribution, site and the image's context, in dist/.
dist: docs
	@ci/dist

clean:
	rm -rf .venv .venv-sglang .venv-ray .venv-proxies .venv-docs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
