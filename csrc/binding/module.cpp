// The Python module `activations_cuda._C`. Loading it registers the ops; what it holds itself tells how it was built.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#if defined(FASTACT_CUDA)
#include <cuda.h>
#endif

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
#if defined(__clang__)
  module.attr("compiler") = "clang " __clang_version__;
#elif defined(__GNUC__)
  module.attr("compiler") = "gcc " __VERSION__;
#else
  module.attr("compiler") = "unknown";
#endif
#if defined(FASTACT_CUDA)
  module.attr("cuda_toolkit") = std::to_string(CUDA_VERSION / 1000) + "." + std::to_string(CUDA_VERSION % 1000 / 10);
#else
  module.attr("cuda_toolkit") = py::none();
#endif
}
