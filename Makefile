# make demo [STEPS=500] [LINK=100e6]   three short runs: loss, bytes, and time at so many bit/s
# make test [PYTHON=python3.12]        the whole test suite, in WORKERS=2 processes of up to 3 GB
# make test QUICK=1                    without most tests of tests/slow.txt
# make journeys                        types every command of the pages, as a reader would
# make format                          ruff: what it can mend, and the layout
# make docs                            the pages of docs/, in docs/_build/html
# make soak [STEPS=1000]               a run of eight processes that is harmed again and again
# make fuzz [INPUTS=3000]              as many inputs for each parser of tests/fuzz
# make mutations                       whether the suite sees each mistake of tests/mutations.txt
# make wheel                           the wheel and the source archive, in dist/
# make release                         checks and tags the version of pyproject.toml, with its wheel and pages
# Each sets up its own virtual environment in this folder first.

PYTHON ?= python3
STEPS ?= 500
LINK ?= 100e6
WORKERS ?= 2
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin

# Half the layers and a quarter of the tokens a step.
TENTH = $(shell echo $$((($(STEPS) + 9) / 10)))
SHORT = --steps $(STEPS) --optimizer.warmup-steps $(TENTH) --eval-every $(TENTH) --eval-batches 32 \
    --model.layers 2 --model.context 64 --data.batch 16 --data.cache runs/demo/data --link-rate $(LINK)

demo: $(VENV)/train.installed
	rm -rf runs/demo
	$(BIN)/python -m train configs/nano_dense.py $(SHORT) --name demo/dense
	$(BIN)/python -m train configs/nano_4bit.py $(SHORT) --name demo/4_bits
	$(BIN)/python -m train configs/nano_cocktail_no_delay.py $(SHORT) --name demo/cocktail
	$(BIN)/python -m train.compare runs/demo/dense runs/demo/4_bits runs/demo/cocktail --link-rate $(LINK)

test: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(QUICK),-m 'not slow')

# The compilers of tests/benchmarks/test_accelerators.py come as plugins, which look for a driver.
test journeys soak fuzz mutations: export JAX_PLATFORMS ?= cpu

journeys: $(VENV)/test.installed
	JOURNEYS=1 $(BIN)/python -m pytest -q --durations=0 -n $(WORKERS) --dist worksteal tests/journeys

installed: $(VENV)/test.installed

format: $(VENV)/test.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs.installed
	$(BIN)/sphinx-build -q -W --keep-going docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

wheel: $(VENV)/test.installed
	rm -rf dist build
	$(BIN)/python -m build -q --no-isolation --outdir dist .

release:
	sh .ci/release $(MAKE)

soak: $(VENV)/test.installed
	$(BIN)/python -m tests.soak --processes 8 --steps $(STEPS)

soak: STEPS = 1000

fuzz: $(VENV)/test.installed
	FUZZ=$(INPUTS) $(BIN)/python -m pytest -q -n $(WORKERS) tests/fuzz

fuzz: INPUTS = 3000

mutations: $(VENV)/test.installed
	$(BIN)/python tests/mutations.py

$(VENV)/bin/python:
	python=$$(sh .ci/python $(PYTHON)) && "$$python" -m venv $(VENV)

$(VENV)/train.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c requirements.txt -e '.[train]'
	touch $@

$(VENV)/test.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c requirements.txt -e '.[train,islands,huggingface,images,tensorboard,accelerators,test]'
	touch $@ $(VENV)/train.installed

$(VENV)/docs.installed: pyproject.toml requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -c requirements.txt -e '.[train,docs]'
	touch $@ $(VENV)/train.installed

clean:
	rm -rf .venv .venv-* .mypy_cache build dist runs docs/_build docs/notebooks/*.ipynb *.egg-info

.PHONY: demo test journeys installed format docs wheel release soak fuzz mutations clean
