"""The few standard headers that kernels include, for a compiler that brings none: what they use of each, no more."""

from __future__ import annotations

_CSTDINT = """
#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
namespace std {
using ::int8_t;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::uint8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uintptr_t;
using ::intptr_t;
}  // namespace std
"""
_CSTDDEF = """
#pragma once
typedef decltype(sizeof(0)) size_t;
typedef long ptrdiff_t;
namespace std {
using ::ptrdiff_t;
using ::size_t;
}  // namespace std
"""
_CLIMITS = """
#pragma once
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295U
"""
_BUILT_IN = "#pragma once\n"  # its functions are the compiler's own

STD_HEADERS = {
    "cstdint": _CSTDINT,
    "cstddef": _CSTDDEF,
    "climits": _CLIMITS,
    "cmath": _BUILT_IN,
    "cstring": _BUILT_IN,
}
