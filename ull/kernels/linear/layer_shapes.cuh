// The linear layers of a transformer layer, but for gate_up (gate_up.cuh): their shapes, and what becomes of their
// sums.
#pragma once

#include "linear/rows.cuh"

namespace ull::gpu {

// Queries, keys and values of the normed residual, in f32, with bias.
using Qkv = LinearShape<kQkvWidth, kHidden, kWeightBits, true>;
using QkvEpilogue = StoreRows<kQkvWidth>;

// The attention's output projection, added to the residual.
using Output = LinearShape<kHidden, kAttentionWidth, kWeightBits, false>;
using OutputEpilogue = AddRows<1>;

// The MLP's down projection, added to the residual.
using Down = LinearShape<kHidden, kIntermediate, kWeightBits, false>;
using DownEpilogue = AddRows<static_cast<int>(1.0F / kMlpScale)>;

}  // namespace ull::gpu
