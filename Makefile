# The command runner. `make demo` and `make test` need nothing but Python >= 3.11 (with venv), g++ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CORE := $(shell find ull/native -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt) ull/kernels/params.h
NATIVE := $(CORE) $(shell find tests/native tests/fuzz -name '*.cpp' -o -name '*.h')
CLIENTS := $(shell find clients tests/clients -name '*.cpp' -o -name '*.hpp')
KERNELS := $(shell find ull/kernels tests/doubles/emulator tests/doubles/fakecuda -name '*.c*' -o -name '*.h')

.PHONY: demo test check lint format native-test sanitize fuzz oldest-nvrtc oracle doors man wheel wheels kernels-report h200 h200-tensorrt
.PHONY: h200-wheels sanitize-native sanitize-threads sanitize-kernels
.PHONY: install clean help
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed  ## build the tiny engine, serve it, stream a completion, print latencies
	@$(BIN)/ull demo

# A file to a process, and first those that take longest, so that no process is left with one at the end. Three processes
# for two cores: what daemons do is mostly waiting. One that crashes is not replaced: xdist would wait for ever for what
# it had left, and never say which test it was.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LONGEST := $(patsubst %,tests/%.py,gpu/test_gpu_end_to_end tensorrt_plans/test_tensorrt_end_to_end \
  $(patsubst %,kernels/test_kernel_%,compile linear attention) gpu/test_gpu_double gpu/test_gpu_models \
  core/test_executor $(patsubst %,kernels/test_kernel_%,layers head_scan ahead) build/test_build \
  build/test_build_cli $(patsubst %,kernels/test_kernel_%,sampling report) build/test_gpu_evaluation)
# OpenBLAS's threads spin while they wait for each other: beside a second process that costs more than they save.
ONE_THREAD := OPENBLAS_NUM_THREADS=1

test: $(VENV)/.installed-test  ## linters, types, the native unit tests, the test suite
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory native-test
	$(ONE_THREAD) $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(LONGEST) $(filter-out $(LONGEST),$(sort $(wildcard tests/*/test_*.py)))

check: $(VENV)/.installed-test  ## linters, types and the quick tests of the rooms that changed: about a minute
	$(BIN)/python tests/house/changed_rooms.py

lint: $(VENV)/.installed-test  ## ruff, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h,$(NATIVE)) $(CLIENTS) $(KERNELS)

format: $(VENV)/.installed-test  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter %.cpp %.h,$(NATIVE)) $(CLIENTS) $(KERNELS)

# The native unit tests, in the module's own build, whose core they share, then under the sanitizers.
NATIVE_TESTS := .cache/native
define run_native_tests
	$(BIN)/cmake --build $(1) --target $(or $(ONLY),native_tests)
	$(BIN)/ctest --test-dir $(1) --output-on-failure -j 3 $(if $(ONLY),-R '^($(subst $(space),|,$(ONLY)))$$')
endef
define configure_sanitized
	$(BIN)/cmake -S ull/native -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DULL_BUILD_MODULE=OFF -DULL_SANITIZE=$(2) > /dev/null
endef

native-test: $(VENV)/.installed-test  ## native unit tests; ONLY="test_a test_b": these alone
	$(call run_native_tests,$$(dirname $$(ls -t .cache/cmake/*/build.ninja | head -1)))

sanitize: sanitize-native sanitize-threads sanitize-kernels  ## native tests under ASan + UBSan, then TSan; kernels under ASan + UBSan

sanitize-native: $(VENV)/.installed-test
	$(call configure_sanitized,$(NATIVE_TESTS)/asan,address$(comma)undefined)
	$(call run_native_tests,$(NATIVE_TESTS)/asan)

sanitize-threads: $(VENV)/.installed-test
	$(call configure_sanitized,$(NATIVE_TESTS)/tsan,thread)
	$(call run_native_tests,$(NATIVE_TESTS)/tsan)

# Those that take longest first.
SANITIZED := $(patsubst %,tests/kernels/test_kernel_%.py,redraw chunk fast_chunk dflash attention linear)
SANITIZED += $(filter-out %_compile.py %_report.py $(SANITIZED),$(wildcard tests/kernels/test_kernel_*.py))
SANITIZED += $(patsubst %,tests/kernels/test_%.py,emulator warpgroup clusters)
sanitize-kernels: $(VENV)/.installed-test
	ULL_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(PRELOADED)" $(ONE_THREAD) \
	  $(BIN)/python -m pytest $(SIDE_BY_SIDE) -p no:faulthandler --capture=sys -o timeout=900 $(SANITIZED)
comma := ,
space := $(subst ,, )
# libstdc++ beside libasan: it looks up what throws exceptions when it starts, and Python itself has none.
PRELOADED = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)

# As many executions of each fuzzer as asked for, first under the sanitizers, then, ten times as many, at full speed.
FUZZ_EXECUTIONS ?= 1000000
FUZZ_SEED ?= 1
define run_fuzzers
	$(BIN)/cmake --build $(1) --target fuzzers
	for fuzzer in $(1)/fuzz_*; do if [ -x $$fuzzer ] && [ -f $$fuzzer ]; then \
	  $$fuzzer tests/fuzz/corpus/$${fuzzer##*/fuzz_} $(2) $(FUZZ_SEED) || exit 1; fi; done
endef
fuzz: $(VENV)/.installed-test  ## run the fuzzers for long: FUZZ_EXECUTIONS of each, FUZZ_SEED
	$(call configure_sanitized,$(NATIVE_TESTS)/asan,address$(comma)undefined)
	$(call run_fuzzers,$(NATIVE_TESTS)/asan,$(FUZZ_EXECUTIONS))
	$(call run_fuzzers,$$(dirname $$(ls -t .cache/cmake/*/build.ninja | head -1)),$(FUZZ_EXECUTIONS)0)
	$(BIN)/python tests/fuzz/fuzz_python.py $(FUZZ_EXECUTIONS) $(FUZZ_SEED)

# NVRTC 13.0 is what comes with PyTorch for CUDA 13; what it takes, later ones have taken so far, but not the reverse.
OLDEST := .cache/nvrtc-13.0
oldest-nvrtc: $(VENV)/.installed-test  ## compile the kernels of an 8B model with the oldest NVRTC that will do
	$(PIP) --no-deps --upgrade --target $(OLDEST) "nvidia-cuda-nvrtc==13.0.*"
	LD_LIBRARY_PATH=$(abspath $(OLDEST)/nvidia/cu13/lib) LD_PRELOAD=$(abspath $(OLDEST)/nvidia/cu13/lib/libnvrtc.so.13) \
	  ULL_NVRTC=13.0 $(BIN)/python -m pytest -n 2 tests/kernels/test_kernel_compile.py -k "llama-3.1-8b or asked_for"

kernels-report: $(VENV)/.installed-test  ## write the static figures of every kernel, which a test holds them to
	$(BIN)/python bench/kernels_report.py

oracle: $(VENV)/.installed-test  ## compare with transformers, PEFT and compressed-tensors, live (installs PyTorch)
	$(PIP) 'torch==2.13.0'
	$(PIP) 'compressed-tensors>=0.20' 'peft>=0.17' 'transformers>=5'
	$(BIN)/python -m pytest tests/oracle -m oracle

# What comes through the doors is heavy, and each of them wants other versions: an environment for each. Plug-ins see ull
# and pytest in .venv through a .pth file; tools are run as they are. What cannot be installed is named, and its tests skip.
DOORS := .cache/doors
SITE = $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')
PLUGINS := pipecat livekit page
TOOLS := aiperf guidellm
doors: $(patsubst %,$(DOORS)/%/.installed,$(PLUGINS) $(TOOLS))  ## voice plug-ins, load generators, the page in Chromium
	for plugin in $(PLUGINS); do \
	  $(DOORS)/$$plugin/bin/python -m pytest -p no:cacheprovider tests/*/test_$$plugin.py || exit 1; done
	$(BIN)/python -m pytest $(patsubst %,tests/gateway/test_%.py,$(TOOLS))

$(DOORS)/%/.installed: $(VENV)/.installed-test
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(if $(filter $*,$(PLUGINS)),echo "import site; site.addsitedir('$(SITE)')" > $$(echo $(@D)/lib/python3*/site-packages)/ull.pth)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $$($(BIN)/python tests/house/requirements_of.py $*) || echo "$* cannot be installed here: its tests skip"
	@touch $@

man: $(VENV)/.installed-test  ## write the man pages of every program into .cache/man
	rm -rf .cache/man
	$(BIN)/python release/man_pages.py .cache/man

wheel: man  ## build a wheel into .cache/wheel, check what is in it, install and use it in an empty environment
	rm -rf .cache/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir .cache/wheel \
	  -C cmake.define.ULL_MAN_PAGES=$(abspath .cache/man) .
	$(BIN)/python tests/house/wheel_contents.py .cache/wheel/ull-*.whl
	$(BIN)/python release/wheel_works.py .cache/wheel/ull-*.whl

wheels: man  ## build and prove the wheels for CPython 3.11 to 3.14 into .cache/wheel, with the interpreters that are here
	rm -rf .cache/wheel
	$(BIN)/python release/wheels.py .cache/wheel $(PYTHONS)

# In two commands, of 330 and 450 seconds; without ULL_H200_STEPS one behind the other.
h200:  ## on an H200: ULL_H200_STEPS=correctness make h200, then ULL_H200_STEPS=figures make h200; one JSON report
	bash bench/h200/run.sh

h200-tensorrt:  ## on an H200 with TensorRT: what it makes of our networks, and its plans beside our kernels
	bash bench/h200/tensorrt.sh

PYTHON312 ?= python3.12
h200-wheels: $(VENV)/.created  ## packages and a native module for `make h200` without a registry (.wheels/; PYTHON312)
	$(BIN)/python bench/h200/wheels.py $(PYTHON312) $(H200_WHEELS)

install: $(VENV)/.installed  ## create .venv and install ull into it

# The package is installed editable: Python edits are live, and native edits are rebuilt by the rule below.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.24' 'ninja>=1.11'
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CORE)
	@echo "installing ull (compiles the native core)"
	$(PIP) --no-build-isolation --editable '.[gateway]'
	@touch $@

# Not as `--editable .[test]`, which without build isolation has others' packages build with what is here, too.
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) $$($(BIN)/python tests/house/requirements_of.py test)
	@touch $@

clean:  ## remove everything that make created
	rm -rf $(VENV) .cache
