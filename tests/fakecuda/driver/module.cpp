#include "module.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "driver.h"

namespace {

std::string folder_of_this_library() {
    Dl_info info{};
    dladdr(reinterpret_cast<void *>(&load_ptx), &info);
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/') + 1);
}

// The newest PTX that a driver takes, by the release notes of CUDA.
int newest_ptx(int driver_version) {
    static constexpr int NEWEST[][2] = {
        {11040, 74}, {11050, 75}, {11060, 76}, {11070, 77}, {11080, 78}, {12000, 80}, {12010, 81}, {12020, 82}, {12030, 83},
        {12040, 84}, {12050, 85}, {12070, 86}, {12080, 87}, {12090, 88}, {13000, 90}, {13010, 91},
    };
    int newest = 0;
    for (const auto &[driver, ptx] : NEWEST) {
        if (driver_version >= driver) newest = ptx;
    }
    return newest;
}

struct Entry {
    std::string name;
    std::vector<unsigned> param_sizes;
    bool has_barrier;
};

// "u64 name" or "b8 name[24]": what follows a parameter's last dot.
unsigned param_size(const std::string &declaration) {
    const unsigned element = unsigned(atoi(declaration.c_str() + 1)) / 8;
    const size_t array = declaration.find('[');
    return array == declaration.npos ? element : element * unsigned(atoi(declaration.c_str() + array + 1));
}

// The text between the parentheses of an entry.
std::vector<unsigned> param_sizes(const std::string &params) {
    std::vector<unsigned> sizes;
    for (size_t at = params.find(".param"); at != params.npos; at = params.find(".param", at + 1)) {
        const std::string declaration = params.substr(at, params.find(',', at) - at);
        sizes.push_back(param_size(declaration.substr(declaration.rfind('.') + 1)));
    }
    return sizes;
}

std::vector<Entry> entries_of(const std::string &ptx) {
    static const std::string ENTRY = ".entry ";
    std::vector<Entry> entries;
    for (size_t at = ptx.find(ENTRY); at != ptx.npos;) {
        const size_t name = at + ENTRY.size(), open = ptx.find('(', name), close = ptx.find(')', open);
        if (open == ptx.npos || close == ptx.npos) break;
        at = ptx.find(ENTRY, close);
        const std::string code = ptx.substr(close, at - close);
        const bool has_barrier = code.find("bar.sync") != code.npos || code.find("barrier") != code.npos;
        const std::string params = ptx.substr(open, close - open);
        entries.push_back({ptx.substr(name, open - name), param_sizes(params), has_barrier});
    }
    return entries;
}

bool same_params(const Entry &entry, const FakeKernel &kernel) {
    return entry.param_sizes.size() == kernel.n_args &&
           std::equal(entry.param_sizes.begin(), entry.param_sizes.end(), kernel.arg_sizes);
}

std::string listed(const std::vector<unsigned> &sizes) {
    std::string text;
    for (const unsigned size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return text;
}

CUresult check_header(const std::string &ptx) {
    const Settings &settings = driver().settings;
    int major = 0, minor = 0, target = 0;
    const size_t version_at = ptx.find(".version "), target_at = ptx.find(".target sm_");
    if (version_at == ptx.npos || target_at == ptx.npos) return CUDA_ERROR_INVALID_PTX;
    sscanf(ptx.c_str() + version_at, ".version %d.%d", &major, &minor);
    sscanf(ptx.c_str() + target_at, ".target sm_%d", &target);
    if (10 * major + minor > newest_ptx(settings.driver_version)) {
        report("PTX %d.%d is newer than driver %d takes", major, minor, settings.driver_version);
        return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    }
    if (target > settings.compute_capability) {
        report("PTX is for sm_%d, the device has compute capability %d", target, settings.compute_capability);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    return CUDA_SUCCESS;
}

} // namespace

bool Kernels::load(const std::string &path) {
    loaded_ = true;
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        report("no kernels: %s", dlerror());
        return false;
    }
    const auto list = reinterpret_cast<decltype(&fakecuda_kernels)>(dlsym(library, "fakecuda_kernels"));
    if (list) kernels_ = list(&n_kernel_);
    return list;
}

void Kernels::load_default() {
    const char *given = getenv("FAKECUDA_KERNELS");
    load(given ? given : folder_of_this_library() + "libkernels.so");
}

const FakeKernel *Kernels::find(const std::string &name) {
    if (!loaded_) load_default();
    for (unsigned i = 0; i < n_kernel_; ++i) {
        if (name == kernels_[i].name) return &kernels_[i];
    }
    return nullptr;
}

CUresult load_ptx(const std::string &ptx, Context *context, ModuleP *module) {
    if (const CUresult bad = check_header(ptx)) return bad;
    auto loaded = std::make_shared<Module>();
    loaded->context = context;
    for (const Entry &entry : entries_of(ptx)) {
        const FakeKernel *kernel = driver().kernels.find(entry.name);
        if (kernel && !same_params(entry, *kernel)) {
            const std::vector<unsigned> source(kernel->arg_sizes, kernel->arg_sizes + kernel->n_args);
            report("%s: parameters of %s bytes in the PTX, of %s in the source", entry.name.c_str(),
                   listed(entry.param_sizes).c_str(), listed(source).c_str());
            return CUDA_ERROR_INVALID_PTX;
        }
        loaded->functions.push_back(std::make_shared<Function>(Function{entry.name, context, kernel, entry.has_barrier}));
    }
    *module = loaded;
    return CUDA_SUCCESS;
}
