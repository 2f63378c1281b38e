#include "forms.cuh"

namespace fastact::cuda {

bool start_float16_form(const Program& program, Stream stream) {
  return start_any_form<c10::Half, 8>(program, stream);
}

// The few that autocast to float16 leads to most often.
bool start_float32_form_of_float16(const Program& program, Stream stream) {
  return is_in_vectors(program, 4) && start_residual_stream<c10::Half, 4>(program, stream);
}

}  // namespace fastact::cuda
