# Every target works from a bare clone: it needs python3, make and the package registries, and sets up the rest.

export PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPED := $(VENV)/.typed
# Where `make clients` puts other people's programs; several trees may share one folder.
CLIENTS := $(or $(HALTER_CLIENTS),.clients)
# The machine's own certificates count, as they do for pip: uv's bundled ones know no company's proxy.
COMPILE = $(BIN)/uv pip compile --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate --quiet --system-certs $(UPGRADE)

# Bytecode is kept, or each process that a test starts would compile Halter anew.
unexport PYTHONDONTWRITEBYTECODE

# Where it counts, a test group that cannot run is a failure and not a skip.
ifeq ($(CI),true)
export HALTER_REQUIRE_ALL := 1
endif

.PHONY: setup system run test check style types docs pictures bench bench-quick clients floors frameworks dist soak versions lock clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements/dev.txt
	@scripts/system-packages python
	@echo "Installing the pinned requirements into $(VENV); the first time takes a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
	@$(BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes halter 2>/dev/null  # its name until 1.0.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

system:
	@scripts/system-packages tests

run: setup
	@$(BIN)/halter demo

# Tests that import the SDKs of models and frameworks: these would take most of each worker's start.
SDKS := tests/adapters tests/external tests/proxy

# These and the types are checked beside the other tests, and shown after them; it fails if any of them fails.
# A plain `make`: with the variable, `make -n test` would run all of this.
test: style system
	@make --no-print-directory types >$(VENV)/types.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest $(SDKS) >$(VENV)/sdks.log 2>&1 & sdks=$$!; \
	$(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) > 2 ? 4 : 3)) --max-worker-restart 0 $(SDKS:%=--ignore=%); \
	tests=$$?; wait $$sdks; sdks=$$?; cat $(VENV)/sdks.log; \
	wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests | sdks | types))

check: style types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# A minute and a half of CPU time, and so only after a change.
types: setup $(TYPED)

$(TYPED): $(INSTALLED) $(shell find src examples -name '*.py')
	$(BIN)/basedpyright
	$(foreach folder,$(sort $(dir $(wildcard examples/*/*.py))),$(BIN)/mypy $(folder) &&) true
	@touch $@

# The pages that are made from the code; a test tells when they have to be made anew.
docs: setup
	$(BIN)/python -m scripts.reference

# The pictures of the documentation, and for people to look at those of every page, in `.pictures`.
pictures: setup system
	$(BIN)/python -m scripts.page_pictures
	HALTER_PICTURES=docs/pictures $(BIN)/python -m pytest -q tests/browser/test_demo.py
	$(BIN)/python -m scripts.pictures

bench: setup system
	$(BIN)/python -m bench

# One short round of every group, without results: it fails if a group no longer works. `.ci/weekly` runs it.
bench-quick: setup system
	$(BIN)/python -m bench --quick

# Other people's programs, pinned, with Halter in front of their tools and models; they reach nothing but 127.0.0.1.
clients: setup system
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) \
		@anthropic-ai/claude-code@2.1.325 @openai/codex@0.166.0 opencode-linux-$$(node -p process.arch)@1.18.18 \
		node-linux-$$(node -p process.arch)@24 @modelcontextprotocol/inspector@2.12.0 \
		@modelcontextprotocol/server-everything@2026.8.31 @modelcontextprotocol/server-filesystem@2026.8.31
	@for client in "llm 3.11 llm==0.36 llm-anthropic==0.30" "aider 3.11 aider-chat==0.86.2" \
		"langchain 3.11 langchain==1.4.7 langchain-openai==1.7.3" \
		"openhands 3.12 openhands-sdk==1.58.0 openhands-tools==1.58.0"; do \
		set -- $$client; name=$$1; python=$$2; shift 2; \
		python$$python -c pass 2>/dev/null || { echo "python$$python is not on the PATH: $$name is left out."; continue; }; \
		$(BIN)/uv venv --quiet --clear --python $$(python$$python -c 'import sys; print(sys.executable)') \
			$(CLIENTS)/$$name && \
		$(BIN)/uv pip install --quiet --system-certs --python $(CLIENTS)/$$name/bin/python "$$@" || exit; done
	HALTER_CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -m clients -o faulthandler_timeout=900 tests/clients

# Each adapter beside the newest version of its framework, as plain pip installs them; `ONLY=crewai` tries one of them.
frameworks:
	@scripts/system-packages python
	@$(PYTHON) scripts/frameworks.py $(ONLY)

# The oldest versions that the requirements admit, in an environment of their own. Libraries warn there of what newer ones
# have changed.
EXTRAS := autonomy,documents,mcp,models,notify,oidc,postgres,server,telemetry,top
floors: setup system
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .versions/floors
	$(BIN)/uv pip install --quiet --system-certs --python .versions/floors/bin/python --resolution lowest-direct '.[$(EXTRAS)]'
	$(BIN)/uv pip install --quiet --system-certs --python .versions/floors/bin/python --group dev --no-build-isolation --editable .
	.versions/floors/bin/python -m pytest -n 2 -W default::DeprecationWarning tests/unit tests/contract tests/crash

# The wheel and the source archive, and an agent that runs from the wheel alone.
dist: setup
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist
	$(BIN)/python -m pytest -q tests/wheel

soak: setup system
	$(BIN)/python -m pytest -m soak --timeout 3600
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile many --timeout 3600
	$(BIN)/python -m pytest -n 2 --dispatcher distributed tests/story tests/crash
	$(BIN)/halter drill race --seeds 1000
	$(BIN)/halter drill chaos --json

# Each newer Python that is there gets an environment of its own; the pinned requirements are the same for all.
versions: system
	@for version in 3.12 3.13 3.14; do \
		python$$version -c pass 2>/dev/null || { echo "python$$version is not on the PATH: left out."; continue; }; \
		$(MAKE) --no-print-directory setup VENV=.versions/$$version PYTHON=python$$version && \
		.versions/$$version/bin/python -m pytest -n 4 --max-worker-restart 0 tests/unit tests/contract tests/crash || exit; \
	done

# Keeps the versions that are pinned already; `make lock UPGRADE=--upgrade` takes the newest ones.
lock: setup
	$(COMPILE) pyproject.toml --all-extras --group dev --output-file requirements/dev.txt
	$(COMPILE) pyproject.toml --output-file requirements/plain.txt
	for peer in bench/peers/requirements/*.in; do $(COMPILE) $$peer --output-file $${peer%.in}.txt || exit; done

clean:
	rm -rf $(VENV) .versions .clients .frameworks .aimock .axe .pictures .bench .pytest_cache .ruff_cache .import_linter_cache .mypy_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
