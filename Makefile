# Every target makes .venv and installs what it needs first; nothing else has to be done by hand. The demo needs little.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILT := $(VENV)/.built
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow test-cpus lint docs bench peers report sanitize sanitize-memory sanitize-threads format clean

demo: $(BUILT)
	$(BIN)/fastformer demo --out demo

# Two processes of one thread each: the tests are many and small. Modules are stored compiled, whatever the surroundings
# say: they would be compiled once more in each process, and tests start many.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# The long tests, which `make test` leaves out. FASTFORMER_TEST_SHARD=0/4 to 3/4 split them among machines.
test-slow: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m 'slow and not gpu'

# The numeric tests as on other kinds of CPU. NumPy's OpenBLAS, which makes the products of Triton's interpreter, has
# kernels for each kind; torch, oneDNN and the extension have AVX2 forms. Half an hour on two cores.
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FASTFORMER_CPU_FEATURES= OPENBLAS_CORETYPE=Haswell
test-cpus: $(INSTALLED)
	for kind in Haswell Zen SkylakeX Cooperlake; do \
		OPENBLAS_CORETYPE=$$kind OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests/kernels tests/ops \
			-k "kernels or triton" || exit; \
	done
	$(AS_AVX2) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# $(1): a folder that becomes a copy of the sources.
define COPY_SOURCES
	rm -rf $(1) && mkdir -p $(1)
	tar cf - --exclude='*.so' --exclude=__pycache__ csrc fastformer kernels benchmarks tests setup.py pyproject.toml \
		README.md LICENSE | tar xf - -C $(1)
endef

# The C++ for AVX-512 and AMX on a CPU that has neither, built in a copy of the sources from SIMDe's headers (Debian's
# libsimde-dev): tests/csrc/emulated.h. Ten minutes on two cores, half of them the compiler's.
EMULATED := build/emulated
test-avx512: $(INSTALLED)
	$(call COPY_SOURCES,$(EMULATED))
	cd $(EMULATED) && FASTFORMER_CXXFLAGS="-O1 -Wno-psabi -include tests/csrc/emulated.h" \
		../../$(BIN)/python setup.py -q build_ext --inplace && rm fastformer/*_avx512*
	cd $(EMULATED) && export ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 && \
		../../$(BIN)/pytest -n 2 --dist worksteal -m 'slow or not slow' tests/engine/test_packed_gemm.py && \
		../../$(BIN)/pytest -n 2 --dist worksteal tests/engine tests/encoding tests/ops \
		tests/generation/test_engines.py tests/generation/test_cpp_engine.py -k 'not triton'

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*/*.cpp csrc/*/*.h
	$(BIN)/mypy

# The site in build/docs, without a network; a warning is an error.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W -n --keep-going -b html docs build/docs

# fastformer beside its rivals at a few small shapes, within ten minutes on two cores: a summary, and lines of JSON.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.run --suite ops modules model decoding --quick --seconds 4 --out build/bench.jsonl
	@echo; echo "Of these, the published tables have:"; $(BIN)/python -m benchmarks.readme --tables build

# The programs that the benchmarks compare with, those that a CPU runs. Those of llama.cpp and of ik_llama.cpp are built
# from the sources in Python packages, for this CPU: ik_llama.cpp's own choice of instructions stops at AVX2.
SOURCES := build/peers/llama_cpp_python-0.3.36/vendor/llama.cpp
IK_SOURCES := build/peers/ik_llama_cpp_python-0.1.5/vendor/ik_llama.cpp
peers: $(INSTALLED) $(BIN)/llama-bench $(BIN)/ik-llama-bench
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -r benchmarks/peers/requirements.txt

build/peers/%: | $(INSTALLED)
	mkdir -p build/peers
	$(BIN)/pip download -q --disable-pip-version-check --no-deps -d build/peers \
		--no-binary $(firstword $(subst -, ,$*)) $(subst -,==,$(firstword $(subst /, ,$*)))
	tar xzf build/peers/$(firstword $(subst /, ,$*)).tar.gz -C build/peers

# $(1): the sources; $(2): what names of programs begin with; $(3): flags of the compiler.
define BUILD_LLAMA
	$(BIN)/pip install -q --disable-pip-version-check cmake
	$(BIN)/cmake -S $(1) -B $(1)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_SERVER=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF -DCMAKE_C_FLAGS='-march=native -w $(3)' \
		-DCMAKE_CXX_FLAGS='-march=native -w $(3)'
	$(BIN)/cmake --build $(1)/build --target llama-bench llama-batched-bench --parallel $(shell nproc)
	cp $(1)/build/bin/llama-batched-bench $(BIN)/$(2)llama-batched-bench
	cp $(1)/build/bin/llama-bench $(BIN)/$(2)llama-bench
endef

# Without llama.cpp's code for AMX: on a Xeon with AMX it ended with an illegal instruction.
$(BIN)/llama-bench: | $(SOURCES)
	$(call BUILD_LLAMA,$|,,-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)

# The package lacks the script that writes build-info.cpp. An empty one stands for it: CMake runs it again after a change
# of the index of the git repository that it finds around it, which is this one.
$(BIN)/ik-llama-bench: | $(IK_SOURCES)
	mkdir -p $|/common/cmake && touch $|/common/cmake/build-info-gen-cpp.cmake
	sed 's/@[A-Z_]*@/0/' $|/common/build-info.cpp.in > $|/common/build-info.cpp
	$(call BUILD_LLAMA,$|,ik-,)

# build/report.html: everything that benchmarks/results holds, on one page.
report: $(INSTALLED)
	$(BIN)/python -m benchmarks.report

sanitize: sanitize-memory sanitize-threads

# The C++ under AddressSanitizer and UBSan, built in a copy of the sources: the installed extension stays as it is. Of the
# slow tests those run in which hypothesis finds thousands of calls to try; others would count the sanitizer's own memory.
SANITIZED := build/sanitize
SANITIZERS := -fsanitize=address,undefined
sanitize-memory: $(INSTALLED)
	$(call COPY_SOURCES,$(SANITIZED))
	cd $(SANITIZED) && FASTFORMER_LDFLAGS="$(SANITIZERS)" \
		FASTFORMER_CXXFLAGS="-O1 -g $(SANITIZERS) -fno-sanitize-recover=undefined -fno-omit-frame-pointer" \
		../../$(BIN)/python setup.py -q build_ext --inplace
	cd $(SANITIZED) && export LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 && ../../$(BIN)/pytest tests/ops \
		-k 'cpp or weight_grad or threads or kilobytes or others or share_out' && \
		../../$(BIN)/pytest tests/engine tests/encoding tests/audio/test_model.py tests/generation/test_cpp_engine.py \
		tests/generation/test_native_search.py tests/generation/test_any_call.py && \
		../../$(BIN)/pytest -m slow -k many tests/engine

# The engine's threads under ThreadSanitizer, without Python, whose own threads it doesn't know.
RACES := $(wildcard csrc/engine/*.cpp) \
	$(patsubst %,csrc/common/%.cpp,thread_team cpu_features buffer_pool memory_report brgemm gemm)
sanitize-threads: $(INSTALLED)
	mkdir -p build
	torch=$$($(BIN)/python -c "import os, torch; print(os.path.dirname(torch.__file__))") && \
		$(CXX) -std=c++20 -O1 -g -fsanitize=thread -fno-math-errno -w -mavx2 -mfma -mf16c \
		-DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2 -Icsrc -I$$torch/include tests/csrc/threads.cpp \
		$(RACES) -o build/threads
	build/threads

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.cpp csrc/*/*.h

clean:
	rm -rf $(VENV) build dist *.egg-info fastformer/*.so

# --no-build-isolation: an isolated build would fetch a second torch to compile against.
$(BUILT): setup.py pyproject.toml constraints.txt $(wildcard csrc/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch numpy "setuptools>=77" wheel ninja
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[train,plot]"
	touch $@

# Not ".[dev]", which would compile everything again.
$(INSTALLED): $(BUILT)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt "fastformer[dev]"
	touch $@
