# The two commands of the README: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help setup demo demo-3 fix check lint plain quick test test-ssh test-gpu bench soak chaos dead clean

help:
	@echo "make demo      set up .venv, then probe -> profile -> plan -> launch -> report on this machine"
	@echo "make test      every test that needs no accelerator (sshd tests need root and iproute2)"
	@echo "make check     format, lint, types, import contracts, quick unit tests: under a minute"
	@echo "make fix       format"
	@echo "make bench     speed claims; results belong in docs/benchmarks.md"
	@echo "make soak      the planner's properties on many more examples: an hour or two"
	@echo "make demo-3    the demo with three vendors"

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt hetrun/__init__.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,dev]'
	@touch $@

demo: setup
	@$(MAKE) --no-print-directory chain INVENTORY=inventories/localhost.yaml

demo-3: setup
	@$(MAKE) --no-print-directory chain INVENTORY=inventories/localhost-3.yaml

.PHONY: chain
chain:
	$(BIN)/hetrun probe   $(INVENTORY) -o facts.json
	$(BIN)/hetrun profile recipes/tiny-llama.yaml --facts facts.json -o profile.json
	$(BIN)/hetrun plan    recipes/tiny-llama.yaml --facts facts.json --profile profile.json -o plan.json
	$(BIN)/hetrun launch  plan.json
	$(BIN)/hetrun report

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In CI, which asks for check and then for test, the quick tests run once, with coverage.
check: lint $(if $(CI),$(VENV)/.quick,plain)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

plain: setup
	$(BIN)/pytest -q -n auto

define counted
$(BIN)/pytest -q -n auto --cov --cov-fail-under=0 --cov-report=
$(BIN)/coverage report --include='hetrun/planner/*,hetrun/schedule/*,hetrun/vendors/*,hetrun/model/*,hetrun/efficiency.py' --fail-under=95
endef

quick: setup
	$(counted)

$(VENV)/.quick: $(VENV)/.done $(shell find hetrun tests docs recipes inventories -type f -not -name '*.pyc')
	$(counted)
	@touch $@

test: setup $(if $(CI),$(VENV)/.quick,quick)
	$(BIN)/pytest -q -n auto -m 'slow and not ssh and not dist and not gpu and not bench'
	$(BIN)/pytest -q -n auto -m 'dist and not gpu and not bench'
	$(BIN)/pytest -q -n auto -m 'ssh and not gpu and not bench'

test-ssh: setup
	$(BIN)/pytest -q -m ssh

test-gpu: setup
	$(BIN)/pytest -q -m gpu

bench: setup
	$(BIN)/pytest -q -s -m bench tests/bench

soak: setup
	EFFORT=20 $(BIN)/pytest -q -n auto -m slow --timeout 3000 tests/unit

chaos: setup
	$(BIN)/pytest -q -m 'bench and dist' tests/dist
	$(BIN)/pytest -q -s --timeout 200 -m 'bench and ssh' tests/ssh

dead: setup
	$(BIN)/vulture hetrun tests --min-confidence 60 --ignore-decorators '@app.*,@pytest.fixture*' --ignore-names 'VENDOR,test_*'

clean:
	rm -rf $(VENV) runs facts.json profile.json plan.json
