# The native CPU backend: build in place, sanitizers, fuzz, benchmark. Included by the Makefile.
.PHONY: native sanitize sanitize-full fuzz-native test-arm bench-cpu

NATIVE_KINDS := $(if $(filter aarch64 arm64,$(shell uname -m)),native-neon,native-avx512 native-avx2) native-generic
NATIVE_PYTEST := tests/backends/test_conformance.py $(NATIVE_KINDS:%=--backend %)
# Without the module site (-S), whose .pth files would put the editable package before PYTHONPATH.
PACKAGES = $$($(BIN)/python -c "import site; print(*site.getsitepackages(), sep=':')")
SANITIZED = PYTHONPATH="build/sanitized:$(PACKAGES)" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -S -m pytest -q -p no:cacheprovider --native-from build/sanitized $(NATIVE_PYTEST)

native: $(VENV)/.core  # beside the sources, for PYTHONPATH=src
	$(INSTALL) cmake ninja
	$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$(CURDIR)/src/aurakv/backends"
	$(BIN)/cmake --build build/native

build/sanitized: $(VENV)/.test $(wildcard native/*) CMakeLists.txt $(shell find src/aurakv -name '*.py')
	$(INSTALL) cmake ninja
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DAURA_SANITIZE=ON -DCMAKE_BUILD_TYPE=None
	$(BIN)/cmake --build build/asan
	rm -rf $@ && mkdir -p $@ && cp -r src/aurakv $@/
	cp build/asan/_native.so $@/aurakv/backends/

sanitize: build/sanitized  # the chosen cases
	$(SANITIZED) -m "not full" -k "test_case and not broken"

sanitize-full: build/sanitized  # the covering set, too
	$(SANITIZED) -k "test_case or covering"

fuzz-native: $(VENV)/.test
	$(BIN)/python tools/native_fuzz.py 7000 $(NATIVE_KINDS)

test-arm:  # emulated
	bash tools/arm.sh

bench-cpu: $(VENV)/.core
	$(BIN)/python benchmarks/cpu.py --json build/cpu.json
