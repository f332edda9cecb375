// Modules: what a driver checks of PTX, and the kernels of the host build that run in its place.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../kernels/abi.h"
#include "cuda.h"

// The library of kernels that were compiled for the host.
class Kernels {
  public:
    // False: the file is no such library.
    bool load(const std::string &path);
    const FakeKernel *find(const std::string &name);

  private:
    void load_default();

    bool loaded_ = false;
    const FakeKernel *kernels_ = nullptr;
    unsigned n_kernel_ = 0;
};

struct Function {
    std::string name;
    Context *context;
    const FakeKernel *kernel;
    bool has_barrier;
};
using FunctionP = std::shared_ptr<Function>;

struct Module {
    Context *context;
    std::vector<FunctionP> functions;
    std::vector<CUfunction> handles;
};
using ModuleP = std::shared_ptr<Module>;

// A module from the text of a PTX file.
CUresult load_ptx(const std::string &ptx, Context *context, ModuleP *module);
