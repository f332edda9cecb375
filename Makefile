CXX      ?= g++
CXXFLAGS ?= -O2
FIXTURE  := tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot

# What the static library needs on Linux beside what g++ links anyway.
LIBS := -lpthread -ldl -lm

# llama.cpp: sources in src/, the build in build/.
LLAMA_CPP_DIR ?= $(CURDIR)/target/llama.cpp
export LLAMA_CPP_DIR

.PHONY: demo test test-all test-llama-server header fixture-table bench bench-quick bench-device bench-llama bench-llama-quick restart-figures llama-cpp clean

# A server's day: prompt, checkpoints, edit, slot file, second process; and a slot file of a real llama.cpp.
demo: build/demo
	build/demo $(FIXTURE)

build/demo: $(wildcard ffi-examples/cpp/*.cpp ffi-examples/cpp/*.hpp) include/kvstate.h target/release/libkvstate.a
	@mkdir -p build
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CXXFLAGS) -Iinclude ffi-examples/cpp/demo.cpp \
		target/release/libkvstate.a $(LIBS) -o $@

target/release/libkvstate.a: Cargo.toml $(shell find src -name '*.rs')
	cargo build --release --quiet --target-dir target

# Formatting, lints, docs, every test, emulated devices, AddressSanitizer, llama.cpp, valgrind where it is installed.
test:
	scripts/test

# The same with every suite on every emulated device, and planted faults: before a release.
test-all:
	scripts/test --all

# An unmodified llama-server with kvstate in front (downloads and builds llama.cpp once).
test-llama-server:
	scripts/test-llama-server

# Writes include/kvstate.h from the sources.
header:
	KVSTATE_WRITE_HEADER=1 cargo test --quiet --test header

# Writes what becomes of each fixture, and the table of the README.
fixture-table:
	KVSTATE_WRITE_FIXTURES=1 cargo test --quiet --test fixture_table

# Writes what the next turn costs after a restart into the README; minutes.
restart-figures:
	KVSTATE_WRITE_FIGURES=1 cargo test --quiet --release --test next_turn

# The table of docs/performance.md, then criterion; ten minutes, 5 GiB of memory and 1 GiB below TMPDIR.
bench:
	cargo bench --bench table
	cargo bench --bench state

# The table in seconds, to see that it runs.
bench-quick:
	cargo bench --quiet --bench table -- --quick

# A cache on device 0 beside plain copies of the driver: docs/gpu.md.
bench-device:
	cargo bench --bench device

# kvstate beside llama.cpp: docs/bench-llama.md.
bench-llama: build/bench-llama
	build/bench-llama --json docs/bench-llama.json --llama b11434 --kvstate "$$(git describe --always --dirty)"
	benches/llama/plot.py docs

# The same in seconds, to see that it runs.
bench-llama-quick: build/bench-llama
	build/bench-llama --quick

build/bench-llama: benches/llama/bench.cpp include/kvstate.h target/release/libkvstate.a | llama-cpp
	@mkdir -p build
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CXXFLAGS) -DNDEBUG -Iinclude \
		$(addprefix -isystem $(LLAMA_CPP_DIR)/src/,src include ggml/include) benches/llama/bench.cpp \
		target/release/libkvstate.a -L$(LLAMA_CPP_DIR)/build/bin -Wl,-rpath,$(abspath $(LLAMA_CPP_DIR))/build/bin \
		-lllama -lggml -lggml-base $(LIBS) -o $@

llama-cpp:
	scripts/llama-cpp lib

clean:
	cargo clean
	rm -rf build
