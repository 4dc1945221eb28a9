#include <stdexcept>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

}  // namespace

const Kernels& select_kernels(const std::string& isa) {
  if (isa == "portable") return portable_kernels();
  const bool automatic = isa == "auto";
  if (!automatic && isa != "avx2" && isa != "avx512") {
    throw std::invalid_argument("isa: \"" + isa + "\" is unknown; choose auto, avx512, avx2 or portable");
  }
#if defined(__x86_64__)
  if ((automatic || isa == "avx512") && has_avx512()) return avx512_kernels();
  if ((automatic || isa == "avx2") && has_avx2()) return avx2_kernels();
#endif
  if (automatic) return portable_kernels();
  throw std::invalid_argument("isa: this machine has no " + isa);
}

}  // namespace ull::cpu
