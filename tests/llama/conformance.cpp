// Runs the same steps with stock llama.cpp and with the adapter in front of it, and holds what they wrote against
// each other and against kvstate alone.
//
//   conformance [--small] MODELS OUT        all cases; exit status 0 if everything is as it should be
//   conformance run MODELS CASE OUT         one leg of one case: its results go to OUT
//   conformance take MODELS CASE OUT FROM   the second half of a round_trip: takes the states in FROM
//   conformance list                        the cases
//   conformance archs                       the models' architectures, as a pattern for test-llama-archs
//
// KVSTATE_LLAMA_ADAPTER is the adapter library; without it only stock and kvstate alone are compared.
// KVSTATE_LLAMA_WRAP is a command to run the adapter's legs under, e.g. "valgrind -q --error-exitcode=9".

#include "compare.hpp"
#include "over_4gib.hpp"
#include "steps.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>

namespace fs = std::filesystem;

const Model *find_model(const std::string &name) {
    for (const Model &model : models) {
        if (name == model.name) return &model;
    }
    throw std::runtime_error("no model " + name);
}

namespace {

int leg(const std::string &steps, const fs::path &model_folder, const Case &the_case,
        const fs::path &out_folder, const fs::path &from_folder) {
    fs::create_directories(out_folder);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    const std::string path = model_folder / (std::string(the_case.model) + ".gguf");
    llama_model *model = llama_model_load_from_file(path.c_str(), params);
    if (!model) throw std::runtime_error("cannot load " + path);
    Results out(out_folder);
    if (steps == "run") {
        if (std::string(the_case.steps) == "k_shift") out.put("rope_freqs", rope_freqs(path));
        run_steps(model, the_case, out);
    } else {
        take_steps(model, the_case, Results(from_folder), out);
    }
    llama_model_free(model);
    return 0;
}

// A leg in a process of its own: llama.cpp aborts on some states.
class Process {
public:
    Process(std::vector<std::string> command, const std::string &preload, const fs::path &log) {
        pid_ = fork();
        if (pid_ < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
        if (pid_ > 0) return;
        const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
        dup2(file, 1);
        dup2(file, 2);
        setenv("GGML_NO_BACKTRACE", "1", 1);  // an abort is enough, without a debugger
        if (!preload.empty()) setenv("LD_PRELOAD", preload.c_str(), 1);
        std::vector<char *> argv;
        for (std::string &word : command) argv.push_back(word.data());
        argv.push_back(nullptr);
        execvp(argv[0], argv.data());
        std::perror(argv[0]);
        _exit(127);
    }

    ~Process() {
        if (pid_ > 0) waitpid(pid_, nullptr, 0);
    }
    Process(const Process &) = delete;

    // How it ended; empty: well.
    std::string wait() {
        int status = 0;
        waitpid(pid_, &status, 0);
        pid_ = 0;
        if (WIFSIGNALED(status)) return std::string("ended by ") + strsignal(WTERMSIG(status));
        return WEXITSTATUS(status) == 0 ? "" : "exit status " + std::to_string(WEXITSTATUS(status));
    }

private:
    pid_t pid_;
};

struct Run {
    fs::path program, models, out;
    std::string adapter, wrap;

    std::vector<std::string> command(const std::string &steps, const Case &the_case, const fs::path &folder,
                                     bool with_adapter, const fs::path &from = {}) const {
        fs::create_directories(folder);
        std::vector<std::string> words;
        std::istringstream before(with_adapter ? wrap : "");
        for (std::string word; before >> word;) words.push_back(word);
        for (const std::string &word :
             {program.string(), steps, models.string(), the_case.name(), folder.string()})
            words.push_back(word);
        if (!from.empty()) words.push_back(from.string());
        return words;
    }
};

bool ended_well(Report &report, const std::string &leg, Process &process, const fs::path &folder) {
    const std::string end = process.wait();
    if (!end.empty())
        report.holds(leg + " runs to its end", false, end + " (see " + (folder / "log").string() + ")",
                     "exit status 0");
    return end.empty();
}

// Stock does some steps only to show that they are no fault of the test: what it may abort on it is not asked.
bool asked_of_stock(const std::string &steps) { return steps != "refusals" && steps != "on_device_refusals"; }

void run_case(const Run &run, const Case &the_case, Report &report) {
    std::string name = the_case.name();
    for (char &c : name) c = c == ' ' || c == '/' ? '-' : c;
    const fs::path folder = run.out / name;
    fs::remove_all(folder);
    const fs::path stock = folder / "stock", adapter = folder / "adapter";
    const fs::path stock_took = folder / "stock-took-adapter", adapter_took = folder / "adapter-took-stock";
    const bool with_stock = asked_of_stock(the_case.steps), with_adapter = !run.adapter.empty();
    const bool takes = std::string(the_case.steps) == "round_trip";

    bool well = true;
    {
        std::optional<Process> second;
        if (with_adapter)
            second.emplace(run.command("run", the_case, adapter, true), run.adapter, adapter / "log");
        if (with_stock) {
            Process first(run.command("run", the_case, stock, false), "", stock / "log");
            well = ended_well(report, "stock", first, stock);
            if (well) compare_stock(the_case, Results(stock), report);
        }
        if (second) well = ended_well(report, "adapter", *second, adapter) && well;
    }
    if (well && with_adapter) {
        if (takes) {
            Process first(run.command("take", the_case, stock_took, false, adapter), "", stock_took / "log");
            Process second(run.command("take", the_case, adapter_took, true, stock), run.adapter,
                           adapter_took / "log");
            well = ended_well(report, "stock with the adapter's states", first, stock_took);
            well = ended_well(report, "adapter with stock's states", second, adapter_took) && well;
        }
        if (well)
            compare_legs(the_case,
                         {Results(stock), Results(adapter), Results(stock_took), Results(adapter_took)},
                         report);
    }
    if (report.failed() == 0) fs::remove_all(folder);
}

int run_all(bool only_small, const fs::path &models, const fs::path &out) {
    const auto variable = [](const char *name) {
        return std::string(std::getenv(name) ? std::getenv(name) : "");
    };
    Run run{fs::read_symlink("/proc/self/exe"), models, out, variable("KVSTATE_LLAMA_ADAPTER"),
            variable("KVSTATE_LLAMA_WRAP")};
    if (run.adapter.empty()) std::puts("skipped: the legs with the adapter, KVSTATE_LLAMA_ADAPTER is not set");

    int passed = 0, failed = 0;
    const auto one = [&](const std::string &name, const auto &body) {
        Report report(name);
        try {
            body(report);
        } catch (const std::exception &error) {
            report.holds("runs to its end", false, error.what(), "no error");
        }
        passed += report.passed();
        failed += report.failed();
    };
    for (const Case &the_case : cases) {
        if (only_small && !(the_case.options & small)) continue;
        if (run.adapter.empty() && !asked_of_stock(the_case.steps)) continue;
        one(the_case.name(), [&](Report &report) { run_case(run, the_case, report); });
    }
    if (!only_small) one("over_4gib", over_4gib);
    std::printf("test result: %s. %d passed; %d failed;\n", failed == 0 ? "ok" : "FAILED", passed, failed);
    return failed == 0 ? 0 : 1;
}

const Case &case_named(const std::string &name) {
    for (const Case &the_case : cases) {
        if (the_case.name() == name) return the_case;
    }
    throw std::runtime_error("no case \"" + name + "\"; `conformance list` lists them");
}

}  // namespace

int main(int argc, char **argv) {
    const std::vector<std::string> args(argv + 1, argv + argc);
    try {
        if (args.size() == 1 && args[0] == "list") {
            for (const Case &the_case : cases)
                std::printf("%s%s\n", the_case.name().c_str(), the_case.options & small ? " (small)" : "");
            return 0;
        }
        if (args.size() == 1 && args[0] == "archs") {
            std::string pattern;
            for (const Model &model : models) pattern += std::string(pattern.empty() ? "^(" : "|") + model.arch;
            std::printf("%s)$\n", pattern.c_str());
            return 0;
        }
        if (args.size() == 4 && args[0] == "run") return leg("run", args[1], case_named(args[2]), args[3], {});
        if (args.size() == 5 && args[0] == "take")
            return leg("take", args[1], case_named(args[2]), args[3], args[4]);
        if (args.size() == 2) return run_all(false, args[0], args[1]);
        if (args.size() == 3 && args[0] == "--small") return run_all(true, args[1], args[2]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "conformance: %s\n", error.what());
        return 1;
    }
    std::fputs(
        "usage: conformance [--small] MODELS OUT\n       conformance list | archs\n       conformance run "
        "MODELS CASE OUT\n"
        "       conformance take MODELS CASE OUT FROM\n",
        stderr);
    return 2;
}
