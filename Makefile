# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
MODEL ?=
ARGS ?=

RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
VLLM := .venv-vllm

.PHONY: help .venv-peers .venv-vllm .venv-clients serve test test-all test-thorough test-rdma test-vllm test-images check format conformance chaos simulate bench bench-transfer bench-store bench-engine bench-vllm reproduce docs proto proto-check proto-compare pages-check clean

help:
	@sed -nE 's/^([a-z-]+):.* ## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '%-15s %s\n' "$$target" "$$text"; done

serve: $(RUNTIME) ## a cluster on this machine: make serve [MODEL=folder-or-hub-name] [ARGS="--prefill-workers 2"]
	$(BIN)/moonserve serve $(MODEL) $(ARGS)

# Compiled bytecode is kept, also where the environment says otherwise: pytest's rewriting of all tests takes each of its
# processes 8 seconds.
export PYTHONDONTWRITEBYTECODE :=

# Tests run in more processes than there are cores, because many tests wait. A selection given by ARGS runs in one.
WORKERS ?= $(if $(ARGS),0,$(shell expr $$(nproc) + $(EXTRA)))
EXTRA = 1
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests for every change: all tests that are fast and need no other program, and one real cluster.
test: $(DEV) ## the tests for every change, in minutes; a part: ARGS="tests/kvstore -k lease"
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES) tests
	$(PYTEST) -m "not slow and not vllm" $(ARGS)

# All other tests: clusters, Ray, Redis, Prometheus, a browser, a virtual machine, ten times the examples of every
# property, 300 clusters in virtual time (60 of them in tests/simulation), and two minutes of fault injection into a real
# one.
test-all: EXTRA = 2
test-all: $(DEV) .venv-clients/.installed ## all other tests, simulation and chaos; tens of minutes
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES) tests
	MOONSERVE_TEST_EXAMPLES=1 $(PYTEST) -m "(slow or examples) and not vllm" $(ARGS)
	$(MAKE) simulate ARGS="--first 60 --seeds 240"
	$(MAKE) chaos MINUTES=2 ARGS="--seed 1"

# All tests, with a hundred times the examples and the longest outages: a nightly run.
test-thorough: $(DEV) ## all tests with a hundred times the examples; hours
	@$(BIN)/python -m compileall -q -j 0 $(PACKAGES) tests
	MOONSERVE_TEST_EXAMPLES=10 $(PYTEST) --timeout=7200 -m "not vllm" $(ARGS)

# RDMA verbs in a small virtual machine (tests/rdma/guest). The first run downloads Debian's kernel package.
test-rdma: $(DEV) ## RDMA verbs in a virtual machine
	$(BIN)/python -m tests.rdma.guest --prepare
	$(BIN)/python -m pytest -s -m rdma tests/rdma $(ARGS)

test-images: ## the Docker image: built by buildah, started, asked (as root, 5 GB)
	tests/deploy/image.sh

# Tests with vLLM, in its own environment. Warnings of vLLM and its dependencies are not errors here.
test-vllm: $(DEV) $(VLLM)/.installed ## the tests beside vLLM, in .venv-vllm (3.5 GB)
	$(VLLM)/bin/python -m pytest --numprocesses $(if $(ARGS),0,2) --dist loadfile -m vllm -W default tests/vllm $(ARGS)
ifndef ARGS
	MOONSERVE_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest -m vllm tests/vllm_serving
endif

check: $(DEV) proto-check pages-check ## format, lint, types, generated files; what CI runs before the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@mkdir -p $(TYPED)/moonserve && ln -sfn $(abspath moonserve/*.py $(SHIPPED) models) $(TYPED)/moonserve && ln -sfn $(abspath benchmarks docs) $(TYPED)
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml moonserve benchmarks docs
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive $(SHIPPED)
	@.ci/audit $(BIN)
	@$(BIN)/python .ci/counts

format: $(DEV) ## repairs format and lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Tests a live cluster against its own /openapi.json for five minutes.
conformance: $(DEV) ## a live cluster against its own OpenAPI description
	$(BIN)/python -m tests.e2e.conformance $(ARGS)

# Injects random faults into the processes, connections and disk of a real cluster (docs/chaos.md).
MINUTES ?= 30
chaos: $(DEV) ## faults into a real cluster: make chaos [MINUTES=30]
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

# Simulates small clusters in virtual time, as many at once as there are cores: make simulate ARGS="--seeds 100000".
simulate: $(DEV) ## clusters in virtual time: make simulate ARGS="--seeds 1000"
	$(BIN)/python -m tests.simulation $(ARGS)

bench: $(DEV) ## added latency of a small cluster
	$(BIN)/python -m benchmarks.serving $(ARGS)

# Peers for comparison are installed in a separate environment. Reports mark the rows of peers that are missing.
PEERS := .venv-bench

# Installs each line of a requirements.txt separately, because one that fails must not prevent the others.
define install-peers
sed 's/ *#.*//; /^$$/d' $< | { all=true; while read -r peer; do \
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -c constraints.txt "$$peer" || all=false; \
done; $$all && touch $@; }
endef

bench-transfer: $(DEV) $(PEERS)/.installed ## the transfer engine beside its peers
	$(BIN)/python -m benchmarks.transfer $(ARGS)

$(PEERS)/.installed: benchmarks/transfer/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	-@$(install-peers)

bench-store: $(DEV) $(PEERS)/.installed $(PEERS)/.installed-stores ## the KV store beside its peers
	$(BIN)/python -m benchmarks.store $(ARGS)

$(PEERS)/.installed-stores: benchmarks/store/speed/requirements.txt | $(PEERS)/.installed
	-@$(install-peers)

# NIXL is installed beside vLLM without its own requirements, which vLLM's environment meets.
bench-vllm: $(DEV) $(VLLM)/.installed ## disaggregated vLLM, by moonserve and by NIXL
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r benchmarks/serving/vllm/requirements.txt
	$(BIN)/python -m benchmarks.serving.vllm $(ARGS)

bench-engine: $(DEV) ## decode and prefill beside other engines
	$(BIN)/python -m benchmarks.engine $(ARGS)

# Other engines for bench-engine: 2.5 GB, and llama.cpp is compiled, without its AMX kernels, which crash (its issue 20824).
# torchvision is removed again: PyPI's build does not match vLLM's torch, and text models do not need it.
NO_AMX = $(if $(filter x86_64,$(shell uname -m)),-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8)
.venv-peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/engine/speed/requirements.txt
	$(PYTHON) -m venv .venv-peers
	CMAKE_ARGS="-DLLAVA_BUILD=OFF $(NO_AMX)" .venv-peers/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	.venv-peers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Programs of other projects that call a cluster (tests/e2e/test_cluster.py): 2.2 GB.
.venv-clients: .venv-clients/.installed

.venv-clients/.installed: tests/e2e/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	@touch $@

# vLLM with moonserve as its users install it: the base requirements, not `serve`. No constraints.txt: vLLM's versions
# differ from it. torchvision is removed as in .venv-peers.
.venv-vllm: $(VLLM)/.installed

$(VLLM)/.installed: tests/vllm/requirements.txt pyproject.toml
	@echo "installing vLLM into $(VLLM) (3.5 GB, a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet -r $<
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --editable .
	@touch $@

# Reproduces Mooncake's published figures from its public trace in out/reproduce/index.html (docs/reproduction.md).
TRACE ?= $(or $(MOONSERVE_TRACE),../shared/traces/conversation_trace.jsonl)

reproduce: $(DEV) ## Mooncake's published figures from its public trace
	$(BIN)/python -m benchmarks.reproduction --trace "$(TRACE)" $(ARGS)

# Generates pages from the code, then the site in site/index.html. Search needs `python -m http.server -d site`.
docs: $(DEV) ## generated pages, and the site in site/
	$(BIN)/python -m docs.reference.configuration docs/configuration.md
	$(BIN)/python -m docs.reference.metrics docs/metrics.md
	$(BIN)/python docs/diagrams/sequence.py docs/diagrams/request.txt docs/images/request.svg
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# SHIPPED: the packages that users install. The other ones are for developers.
SHIPPED := protocol transfer kvstore engine conductor worker prefill_worker decode_worker gateway traces deploy moonserve/vllm moonserve/sglang
PACKAGES := $(SHIPPED) moonserve models benchmarks docs
# Links that give the packages their installed names, for mypy.
TYPED := build/typed

# The compiler is older than the runtimes. Its stubs import with every grpcio from 1.63 and protobuf from 5.26, as those
# of OpenTelemetry do. Newer stubs refuse an older runtime and one of the next but one major version, and environments of
# other engines have either. The compiler runs without its own requirement, protobuf<6, so it is installed by itself.
# It has no wheel for Python 3.13.
PROTOC_HOME := build/protoc
PROTOC := PATH=$(BIN):$$PATH PYTHONPATH=$(PROTOC_HOME) $(BIN)/python -m grpc_tools.protoc -Imoonserve/protocol/pb=proto
PROTOS := $(patsubst proto/%,moonserve/protocol/pb/%,$(wildcard proto/*.proto))
STUBS := build/stubs

$(PROTOC_HOME)/.installed: constraints.txt | $(DEV)
	@rm -rf $(PROTOC_HOME)
	$(PIP) --no-deps --only-binary :all: --target $(PROTOC_HOME) grpcio-tools
	@touch $@

.PHONY: $(STUBS)
$(STUBS): $(DEV) $(PROTOC_HOME)/.installed
	@rm -rf $@ && mkdir -p $@
	@$(PROTOC) --python_out=$@ --grpc_python_out=$@ --mypy_out=quiet:$@ --mypy_grpc_out=quiet:$@ $(PROTOS)

proto: $(STUBS) ## the stubs of proto/ in protocol/pb/
	cp $</moonserve/protocol/pb/* protocol/pb/

# The checked-in stubs must equal the output of the pinned compiler for the .proto files.
proto-check: $(if $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info < (3, 13) else "")'),proto-compare)

proto-compare: $(STUBS)
	@diff -r -x __pycache__ -x __init__.py $</moonserve/protocol/pb protocol/pb || { echo "protocol/pb is stale: run make proto"; exit 1; }

# The checked-in pages generated from the code must be up to date too.
pages-check: $(DEV)
	@fresh=$$(mktemp -d) && trap 'rm -rf $$fresh' EXIT && \
	$(BIN)/python -m docs.reference.configuration $$fresh/configuration.md && $(BIN)/python -m docs.reference.metrics $$fresh/metrics.md && \
	for page in configuration metrics; do \
		diff $$fresh/$$page.md docs/$$page.md || { echo "docs/$$page.md is stale: run make docs"; exit 1; }; \
	done

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moonserve needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# torch is installed first, so that no other package chooses its build.
$(RUNTIME): $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing pinned dependencies into $(VENV) (the first time takes a few minutes)"
	$(PIP) torch
	$(PIP) --editable '.[serve]'
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) --editable '.[dev]'
	@touch $@

clean: ## removes environments and build output
	rm -rf $(VENV) $(PEERS) .venv-peers $(VLLM) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
