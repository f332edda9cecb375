#include "driver.h"

#include <cstdio>
#include <cstdlib>

thread_local Context *current_context = nullptr;

namespace {

void set_from_environment(Driver &driver) {
    const auto number = [](const char *name, int otherwise) {
        const char *text = getenv(name);
        return text ? atoi(text) : otherwise;
    };
    Settings &settings = driver.settings;
    settings.devices = number("FAKECUDA_DEVICES", settings.devices);
    settings.driver_version = number("FAKECUDA_DRIVER", settings.driver_version);
    settings.compute_capability = number("FAKECUDA_CC", settings.compute_capability);
    settings.memory_pools = number("FAKECUDA_POOLS", settings.memory_pools) != 0;
    settings.trace = number("FAKECUDA_TRACE", 0) != 0;
    const char *mode = getenv("FAKECUDA_MODE");
    const bool eager = mode && std::string(mode) == "eager";
    driver.worker.set_mode(eager ? Mode::Eager : Mode::Lazy, unsigned(number("FAKECUDA_SEED", 1)));
}

} // namespace

Driver &driver() {
    static Driver *const only = [] {
        auto *created = new Driver;
        set_from_environment(*created);
        return created;
    }();
    return *only;
}

Context *Driver::context_of(uintptr_t address) const {
    for (const auto &context : contexts) {
        if (context->memory.covers(address)) return context.get();
    }
    return nullptr;
}

void report(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "fakecuda: %s\n", text);
}
