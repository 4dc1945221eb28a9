// The portable table of kernels.h.
#include "exec/cpu/kernels.h"

#include "exec/cpu/kernels_matrix.h"
#include "exec/cpu/kernels_vector.h"
#include "exec/cpu/simd_portable.h"

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
