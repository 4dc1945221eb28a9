"""The parameters of the probes, kernels that the emulator's own tests run (tests/doubles/emulator/probe.h)."""

import ctypes


class Probe(ctypes.Structure):
    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("fault", ctypes.c_int32),
    ]
