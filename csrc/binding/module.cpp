// The Python module `activations_cuda._C`. Loading it registers the ops; what it holds itself is how it was built, and for each
// member of the family a direct way in, since a call through torch.ops costs a microsecond more than the op.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "family.h"

#if defined(FASTACT_CUDA)
#include <cuda.h>
#endif

namespace fastact {
namespace {

template <class Op, class... Parameters>
struct Call {
  static at::Tensor call(const at::Tensor& self, Parameters... parameters) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow((std::string("fastact::") + Op::name).c_str(), Op::overload)
                               .template typed<at::Tensor(const at::Tensor&, Parameters...)>();
    return op.call(self, parameters...);
  }
};

}  // namespace
}  // namespace fastact

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fastact;
#define ACTIVATION(op, overload, F, parameters, pytorch) \
  module.def(#op, torch::wrap_pybind_function_no_gil(&WithParameters<Call, F##Op>::call));
#include "../family.def"

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
