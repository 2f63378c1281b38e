#include "forms.cuh"

namespace fastact::cuda {

bool start_bfloat16_form(const Program& program, Stream stream) {
  return start_any_form<c10::BFloat16, 8>(program, stream);
}

}  // namespace fastact::cuda
