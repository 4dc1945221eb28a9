// The portable table of kernels.h.
#include "cpu/kernels/kernels.h"

#include "cpu/kernels/kernels_matrix.h"
#include "cpu/kernels/kernels_vector.h"
#include "cpu/kernels/simd_portable.h"

namespace ull::cpu {
namespace {

constexpr Kernels make_table() {
  Kernels table{};
  fill_matrix_kernels<Portable>(table);
  fill_vector_kernels<Portable>(table);
  return table;
}

constexpr Kernels kTable = make_table();

}  // namespace

const Kernels& portable_kernels() noexcept { return kTable; }

}  // namespace ull::cpu
