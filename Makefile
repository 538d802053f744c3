# Every target prepares what it needs; from an empty clone, `make demo` or `make test` is enough.

PYTHON ?= python3
VENV ?= .venv
MODEL := .models/SmolLM2-135M-Instruct.Q4_1.gguf
# One environment, installed in two steps: what serving needs, and on top of it what developing needs.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
STUBS ?= clients/python
EXTRAS := deploy,docs,openai-sdk,pyright,ray,triton
comma := ,
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := # empty: tests start hundreds of processes, which would compile all code anew

.DEFAULT_GOAL := help
.PHONY: help recording references demo serve test test-long test-slow test-commands test-wheel test-node test-openai test-openai-frameworks test-page test-fleet test-board test-clients test-triton lint wheel kernels format protos blocking bench bench-hostile bench-door-hostile soak bench-gpu gpu-wheels check-deploy check-alerts docs model install extras clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-23s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(SERVING) ## From nothing to eight prompts streaming at once
	@$(BIN)/paceline demo

serve: $(SERVING) ## Serve the default model until Ctrl-C (ARGS="--port 50060" ...)
	@$(BIN)/paceline serve $(ARGS)

# Processes of services come first and wait now and then, unit tests come last and fill both cores.
test: $(STAMP) $(MODEL) ## Run the default test suite, three files at a time (ARGS="-k name" ...)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(STAMP) $(MODEL) ## Run the tests that kill, freeze and flood services, and others of many seconds a file
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'long and not slow' --numprocesses 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) $(MODEL) ## Run the tests that take minutes each, and print what they found
	$(BIN)/python -m pytest -m slow -s $(ARGS)

test-commands: $(STAMP) $(VENV)/.extra-pyright $(MODEL) ## Run what README and docs tell readers to run, against real services
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/commands tests/gpu -m commands --numprocesses 2 --dist worksteal $(ARGS)

wheel: $(STAMP) ## Build the wheel into dist/, the same bytes each time (pipx install "$$(ls dist/*.whl)[all]")
	.ci/build-wheel $(BIN) dist

test-wheel: $(STAMP) ## Install the wheel into an empty environment and run a stranger's tests there
	.ci/check-wheel $(BIN)

test-node: $(STAMP) ## Run the Node client's tests against a live service
	cd clients/node && npm ci --no-audit --no-fund && npm test

test-openai: $(STAMP) $(VENV)/.extra-openai-sdk $(MODEL) ## OpenAI's own SDKs, Python and Node, against `paceline serve --openai`
	cd tests/gateway && npm ci --no-audit --no-fund
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gateway -m openai --numprocesses 2 --dist loadfile $(ARGS)

test-openai-frameworks: $(STAMP) ## LangChain, litellm, LlamaIndex and Node's AI SDK, in environments of their own under build/
	test -d build/frameworks || $(PYTHON) -m venv build/frameworks
	build/frameworks/bin/pip install --quiet langchain-openai litellm llama-index-llms-openai-like llama-index-embeddings-openai-like
	npm install --prefix build/frameworks/node --no-save --no-audit --no-fund ai@6 @ai-sdk/openai-compatible@2 zod@4
	$(BIN)/python -m tests.gateway.frameworks build/frameworks/bin/python build/frameworks/node/node_modules

test-page: $(STAMP) $(VENV)/.extra-browser ## The chat page and the timeline in a browser: needs chromium and chromedriver (apt install chromium-driver)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gateway -m browser $(ARGS)

test-fleet: $(STAMP) $(VENV)/.extra-ray ## Stacks on three nodes of Ray on this machine, of which one is killed under streams (ARGS="-m 'fleet and slow'")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fleet -m 'fleet and not slow' -s $(ARGS)

test-board: $(STAMP) ## Each query of the Grafana board on a served demo: needs Prometheus (apt install prometheus)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration -m prometheus -s $(ARGS)

test-clients: $(STAMP) ## Build the clients of all languages and run one scenario with each (ARGS="go ruby")
	.ci/clients $(BIN) $(ARGS)

test-triton: $(STAMP) $(VENV)/.extra-triton ## Interpret and compile the CUDA kernels; no GPU needed (ARGS="-m slow": all shapes)
	$(BIN)/python -m pytest tests/triton -m 'triton and not slow' $(ARGS)

lint: $(STAMP) ## Style, types, import arrows, contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/check-protos $(BIN)
	$(BIN)/python .ci/blocking-clients --check
	$(BIN)/python .ci/references --check
	$(BIN)/python .ci/count

kernels: $(SERVING) ## Compile all CPU kernels into the cache, which takes a minute of one core
	$(BIN)/python -m executor_service.backends.torch_backend.cpu.threads.compile_all

format: $(STAMP) ## Rewrite the code in the common style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## Write the Python stubs anew (STUBS=directory)
	@mkdir -p $(STUBS)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(STUBS) \
		--grpc_python_out=$(STUBS) --mypy_out=$(STUBS) --mypy_grpc_out=$(STUBS) $(PROTOS)

references: $(STAMP) ## Write docs/reference anew, from the code
	$(BIN)/python .ci/references

blocking: $(STAMP) ## Write the blocking Python clients anew, from the asyncio ones
	$(BIN)/python .ci/blocking-clients

check-deploy: $(STAMP) $(VENV)/.extra-deploy ## Check the files of deploy/ by schemas and linters of their formats
	.ci/check-deploy $(BIN)

check-alerts: ## Check the alert rules, and run their unit tests: needs promtool (apt install prometheus)
	cd deploy/prometheus && promtool check rules alerts.yaml && promtool test rules alerts_test.yaml

docs: $(STAMP) $(VENV)/.extra-docs ## Build the site of docs/ into build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

recording: $(STAMP) $(MODEL) ## Draw examples/kill_nine.py as it runs here into docs/pictures: needs npx
	PATH="$(abspath $(BIN)):$$PATH" .ci/record docs/pictures/kill-nine.svg python examples/kill_nine.py

bench: $(STAMP) $(MODEL) ## Measure the default model on this machine (ARGS="-c 1,8,32" ...)
	@$(BIN)/paceline bench --serve torch $(ARGS)

bench-hostile: $(STAMP) $(MODEL) ## Measure what hostile clients cost, in 37 minutes (ARGS="--short": in six)
	@$(BIN)/python -m tests.bench.hostile $(ARGS)

bench-door-hostile: $(STAMP) ## Measure what attacks on the OpenAI API cost, in two minutes (ARGS="--short": in 15 s)
	@$(BIN)/python -m tests.bench.door_hostile $(ARGS)

soak: $(STAMP) ## Mixed load while faults strike, for 30 minutes (ARGS="--minutes 5 --seed 7")
	@$(BIN)/python -m tests.bench.soak $(ARGS)

bench-gpu: ## Check and measure the CUDA worker (ARGS="--only right", fast, why: ten minutes each; "--dry": on CPU)
	@tests/gpu/run $(ARGS)

gpu-wheels: $(STAMP) ## Fetch into gpu-wheels/ what `make bench-gpu` needs where torch is and no network (Python 3.12, x86_64)
	rm -rf gpu-wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest gpu-wheels \
		--python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --requirement tests/gpu/wheels.txt
	@du -sh gpu-wheels

model: $(MODEL) ## Fetch the default model (98 MB, checksum verified)

install: $(STAMP) ## Install what developing needs, as all targets but demo, serve, kernels and model do

$(MODEL): | $(SERVING)
	@$(BIN)/paceline pull --directory $(@D)

$(SERVING): pyproject.toml constraints.txt
	@.ci/set-up "$(PYTHON)" $(VENV) all serving
	@touch $@

$(STAMP): $(SERVING)
	@.ci/set-up "$(PYTHON)" $(VENV) dev developing
	@touch $@

# What a few targets need besides, installed once for each extra.
$(VENV)/.extra-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

extras: $(STAMP) ## Install at once what the targets of .ci/run need besides
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(patsubst %,$(VENV)/.extra-%,$(subst $(comma), ,$(EXTRAS)))

clean: ## Remove what was made, but for the model
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf tests/gateway/node_modules clients/node/node_modules clients/node/protos clients/node/types
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
