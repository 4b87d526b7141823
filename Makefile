# moonserve: everything is one of these.
#   make serve [MODEL=folder-or-hub-name] [ARGS="--prefill-workers 2"]
#   make test | test-all | test-thorough | test-rdma | check | chaos | simulate | bench | bench-transfer | bench-store | bench-engine | reproduce | docs | proto | clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
MODEL ?=
ARGS ?=

RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev

.PHONY: .venv-peers serve test test-all test-thorough test-rdma check format conformance chaos simulate bench bench-transfer bench-store bench-engine reproduce docs proto proto-check pages-check clean

serve: $(RUNTIME)
	$(BIN)/moonserve serve $(MODEL) $(ARGS)

# Tests run in several processes, more than there are cores since many tests wait; a part of them, as ARGS says, in one.
WORKERS ?= $(if $(ARGS),0,$(shell expr $$(nproc) + $(EXTRA)))
EXTRA = 1
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# What a change is tried with: everything that takes no other program and little time, and one real cluster.
test: $(DEV)
	@$(BIN)/python -m compileall -q $(PACKAGES) tests
	$(PYTEST) -m "not slow" $(ARGS)

# All else: clusters, Ray, Redis, Prometheus, a browser, a virtual machine, ten times the examples of every property,
# three hundred clusters in virtual time, and two minutes of attacks on a real one.
test-all: EXTRA = 2
test-all: $(DEV)
	@$(BIN)/python -m compileall -q $(PACKAGES) tests
	MOONSERVE_TEST_EXAMPLES=1 $(PYTEST) -m "slow or examples" $(ARGS)
	$(MAKE) simulate ARGS="--seeds 300"
	$(MAKE) chaos MINUTES=2 ARGS="--seed 1"

# Both, with a hundred times the examples and the longest outages: for the night.
test-thorough: $(DEV)
	@$(BIN)/python -m compileall -q $(PACKAGES) tests
	MOONSERVE_TEST_EXAMPLES=10 $(PYTEST) --timeout=7200 $(ARGS)

# Verbs, in a small virtual machine (tests/rdma/guest); the first time fetches Debian's kernel package.
test-rdma: $(DEV)
	$(BIN)/python -m tests.rdma.guest --prepare
	$(BIN)/python -m pytest -s -m rdma tests/rdma $(ARGS)

check: $(DEV) proto-check pages-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive $(SHIPPED)
	@.ci/audit $(BIN)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A live cluster against its own /openapi.json, for five minutes.
conformance: $(DEV)
	$(BIN)/python -m tests.e2e.conformance $(ARGS)

# A real cluster whose processes, connections and disk are attacked at random (docs/chaos.md).
MINUTES ?= 30
chaos: $(DEV)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

# The whole cluster in virtual time, one small world after the other: make simulate ARGS="--seeds 100000".
simulate: $(DEV)
	$(BIN)/python -m tests.simulation $(ARGS)

bench: $(DEV)
	$(BIN)/python -m benchmarks.serving $(ARGS)

# Other engines live in an environment of their own; without them their rows say so.
PEERS := .venv-bench

# Each line of a requirements.txt by itself, since one that this machine cannot have must not cost the others.
define install-peers
sed 's/ *#.*//; /^$$/d' $< | { all=true; while read -r peer; do \
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -c constraints.txt "$$peer" || all=false; \
done; $$all && touch $@; }
endef

bench-transfer: $(DEV) $(PEERS)/.installed
	$(BIN)/python -m benchmarks.transfer $(ARGS)

$(PEERS)/.installed: benchmarks/transfer/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	-@$(install-peers)

bench-store: $(DEV) $(PEERS)/.installed $(PEERS)/.installed-stores
	$(BIN)/python -m benchmarks.store $(ARGS)

$(PEERS)/.installed-stores: benchmarks/store/requirements.txt | $(PEERS)/.installed
	-@$(install-peers)

bench-engine: $(DEV)
	$(BIN)/python -m benchmarks.engine $(ARGS)

# Other engines, for bench-engine: 2.5 GB, and llama.cpp is compiled. torchvision goes again: PyPI's is not for vLLM's torch,
# and a model of text does without.
.venv-peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/engine/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	CMAKE_ARGS=-DLLAVA_BUILD=OFF .venv-peers/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	.venv-peers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Mooncake's published figures from its public trace, as out/reproduce/index.html (docs/reproduction.md).
TRACE ?= $(or $(MOONSERVE_TRACE),../shared/traces/conversation_trace.jsonl)

reproduce: $(DEV)
	$(BIN)/moonserve reproduce --trace "$(TRACE)" $(ARGS)

# Pages that are made from the code, then the site, which is site/index.html; `python -m http.server -d site` has its search, too.
docs: $(DEV)
	$(BIN)/python -m docs.reference.configuration docs/configuration.md
	$(BIN)/python -m docs.reference.metrics docs/metrics.md
	$(BIN)/python docs/diagrams/sequence.py docs/diagrams/request.txt docs/images/request.svg
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# What runs where users are; the rest is for developers.
SHIPPED := protocol transfer kvstore engine conductor worker prefill_worker decode_worker gateway traces deploy
PACKAGES := protocol transfer kvstore engine conductor worker prefill_worker decode_worker gateway traces deploy models benchmarks docs

PROTOC := $(BIN)/python -m grpc_tools.protoc -Iprotocol/pb=proto
PROTOS := $(patsubst proto/%,protocol/pb/%,$(wildcard proto/*.proto))

proto: $(DEV)
	PATH=$(BIN):$$PATH $(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

# The checked-in stubs must be what the .proto files and the pinned compiler give.
proto-check: $(DEV)
	@fresh=$$(mktemp -d) && trap 'rm -rf $$fresh' EXIT && \
	PATH=$(BIN):$$PATH $(PROTOC) --python_out=$$fresh --grpc_python_out=$$fresh --mypy_out=quiet:$$fresh --mypy_grpc_out=quiet:$$fresh $(PROTOS) && \
	diff -r -x __pycache__ -x __init__.py $$fresh/protocol/pb protocol/pb || { echo "protocol/pb is stale: run make proto"; exit 1; }

# Likewise the pages that are made from the code.
pages-check: $(DEV)
	@fresh=$$(mktemp -d) && trap 'rm -rf $$fresh' EXIT && \
	$(BIN)/python -m docs.reference.configuration $$fresh/configuration.md && $(BIN)/python -m docs.reference.metrics $$fresh/metrics.md && \
	for page in configuration metrics; do \
		diff $$fresh/$$page.md docs/$$page.md || { echo "docs/$$page.md is stale: run make docs"; exit 1; }; \
	done

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moonserve needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# torch before everything else, so that nothing else chooses its build.
$(RUNTIME): $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing pinned dependencies into $(VENV) (the first time takes a few minutes)"
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) .venv-peers build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
