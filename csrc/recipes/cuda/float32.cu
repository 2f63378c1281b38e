#include "forms.cuh"

namespace fastact::cuda {

bool start_float32_form(const Program& program, Stream stream) {
  return start_any_form<c10::BFloat16, 4>(program, stream);
}

}  // namespace fastact::cuda
