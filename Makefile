CXX      ?= g++
CXXFLAGS ?= -O2
FIXTURE  := tests/fixtures/tiny2x64_kf16_vf16_n64_none.slot

# What the static library needs on Linux beside what g++ links anyway.
LIBS := -lpthread -ldl -lm

.PHONY: demo test test-llama-server header bench clean

# A server's day: prompt, checkpoints, edit, slot file, second process; and a slot file of a real llama.cpp.
demo: build/demo
	build/demo $(FIXTURE)

build/demo: $(wildcard ffi-examples/cpp/*.cpp ffi-examples/cpp/*.hpp) include/kvstate.h target/release/libkvstate.a
	@mkdir -p build
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CXXFLAGS) -Iinclude ffi-examples/cpp/demo.cpp \
		target/release/libkvstate.a $(LIBS) -o $@

target/release/libkvstate.a: Cargo.toml $(shell find src -name '*.rs')
	cargo build --release --quiet --target-dir target

# Formatting, lints, docs, every test, the suite under AddressSanitizer, valgrind where it is installed.
test:
	scripts/test

# An unmodified llama-server with kvstate in front (downloads and builds llama.cpp once).
test-llama-server:
	scripts/test-llama-server

# Writes include/kvstate.h from the sources.
header:
	KVSTATE_WRITE_HEADER=1 cargo test --quiet --test header

bench:
	cargo bench --bench state

clean:
	cargo clean
	rm -rf build
