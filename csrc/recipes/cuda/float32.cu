#include "forms.cuh"

namespace fastact::cuda {

// bfloat16 is what operands in a half type are in.
bool start_float32_form(const Program& program, Stream stream) {
  return start_any_form<c10::BFloat16, 4>(program, stream);
}

}  // namespace fastact::cuda
