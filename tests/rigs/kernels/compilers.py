"""Marks of tests that compile kernels for the chip instead of running them."""

import pytest

import emulation

compiles = pytest.mark.skipif(emulation.SANITIZE, reason="NVRTC does not find its libraries beside AddressSanitizer")
disassembles = pytest.mark.skipif(
    emulation.SANITIZE or emulation.ON_DEVICE, reason="as above; and nvdisasm is no part of what `make h200` needs"
)
