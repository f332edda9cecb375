// kill_at N program args...: runs a program and kills it (SIGKILL) right before its Nth step: a call that creates, writes,
// reserves, locks, syncs, renames or removes a file. Only steps between two calls of chdir count, whoever's thread makes them.
// Prints "killed before step N" and the number of the call, or "ended after N steps" and exits with the program's status.

#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// Numbers of calls that not every architecture has.
#ifndef SYS_rename
#define SYS_rename (-1)
#endif
#ifndef SYS_unlink
#define SYS_unlink (-1)
#endif
#ifndef SYS_renameat
#define SYS_renameat (-1)
#endif
#ifndef SYS_chmod
#define SYS_chmod (-1)
#endif

static int is_step(long nr, const unsigned long long *args) {
    static const long steps[] = {
        SYS_write,  SYS_pwrite64,  SYS_writev,    SYS_pwritev, SYS_fallocate, SYS_ftruncate, SYS_fsync,    SYS_fdatasync,
        SYS_rename, SYS_renameat,  SYS_renameat2, SYS_unlink,  SYS_unlinkat,  SYS_fchmod,    SYS_fchmodat, SYS_chmod,
        SYS_flock,  SYS_linkat,
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        if (nr == steps[i]) return 1;
    }
    return nr == SYS_openat && (args[2] & O_CREAT) != 0;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const long last = atol(argv[1]);
    const pid_t child = fork();
    if (child < 0) return 2;
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) _exit(77);
        raise(SIGSTOP);
        execvp(argv[2], argv + 2);
        _exit(2);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) return 77;
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SETOPTIONS, child, NULL, (void *)options) != 0) return 77;
    ptrace(PTRACE_SYSCALL, child, NULL, NULL);

    long n = 0;
    int counting = 0;
    for (;;) {
        const pid_t pid = waitpid(-1, &status, __WALL);
        if (pid < 0) return 2;
        if (WIFEXITED(status) || WIFSIGNALED(status)) {
            if (pid != child) continue;
            printf("ended after %ld steps\n", n);
            return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
        }
        long signal = 0;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            struct __ptrace_syscall_info info;
            if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, (void *)sizeof info, &info) <= 0) return 2;
            if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
                const long nr = (long)info.entry.nr;
                if (nr == SYS_chdir) counting = !counting;
                if (counting && is_step(nr, (const unsigned long long *)info.entry.args) && ++n == last) {
                    kill(child, SIGKILL);
                    // Its threads have to be waited for before it ends.
                    pid_t ended;
                    do {
                        ended = waitpid(-1, &status, __WALL);
                    } while (ended > 0 && !(ended == child && WIFSIGNALED(status)));
                    printf("killed before step %ld, call %ld\n", n, nr);
                    return 0;
                }
            }
        } else if (WSTOPSIG(status) != SIGTRAP && WSTOPSIG(status) != SIGSTOP) {
            signal = WSTOPSIG(status);
        }
        ptrace(PTRACE_SYSCALL, pid, NULL, (void *)signal);
    }
}
