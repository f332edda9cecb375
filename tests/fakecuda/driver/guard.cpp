#include "guard.h"

#include <signal.h>
#include <unistd.h>

#include "driver.h"

namespace {

struct sigaction before_segv, before_bus;

// Only what a signal handler may call.
void say(const char *what, uintptr_t address) {
    char text[160];
    const int n = snprintf(text, sizeof text, "fakecuda: %s at %#lx\n", what, address);
    if (write(STDERR_FILENO, text, size_t(n)) != n) return;
}

// Whoever handled the signal before: Rust's runtime, a sanitizer, or nobody.
void pass_on(const struct sigaction &before, int signal, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        // The access runs again, and ends the process.
        sigaction(signal, &before, nullptr);
    }
}

void on_fault(int signal, siginfo_t *info, void *context) {
    const auto address = uintptr_t(info->si_addr);
    if (driver().context_of(address)) say("host code touched device memory", address);
    pass_on(signal == SIGSEGV ? before_segv : before_bus, signal, info, context);
}

} // namespace

void watch_host_accesses() {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    // The other stack, so that the handler before this one can still tell of a stack that is full.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
}
