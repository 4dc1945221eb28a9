// The avx512 table of kernels.h.
#include "cpu/kernels/kernels.h"

#if defined(__x86_64__)
#include "cpu/kernels/kernels_matrix.h"
#include "cpu/kernels/kernels_vector.h"
#include "cpu/kernels/simd_avx512.h"

namespace ull::cpu {
namespace {

constexpr Kernels make_table() {
  Kernels table{};
  fill_matrix_kernels<Avx512>(table);
  fill_vector_kernels<Avx512>(table);
  return table;
}

constexpr Kernels kTable = make_table();

}  // namespace

const Kernels& avx512_kernels() noexcept { return kTable; }

}  // namespace ull::cpu
#endif
