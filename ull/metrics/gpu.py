"""What NVML says of the GPU that an engine runs on. Without one, or without nvidia-ml-py, there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_Read = Callable[[Any, Any], float]

# Metric: meaning, and how NVML is asked. `n` is the module pynvml, `h` the device's handle.
_GAUGES: dict[str, tuple[str, _Read]] = {
    "ull_gpu_temperature_celsius": (
        "of the GPU's core",
        lambda n, h: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    ),
    "ull_gpu_power_watts": ("drawn now", lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3),
    "ull_gpu_sm_clock_hertz": ("of the SMs, now", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1e6),
    "ull_gpu_memory_clock_hertz": (
        "of the memory, now",
        lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) * 1e6,
    ),
    "ull_gpu_memory_used_bytes": ("by all processes", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used),
    "ull_gpu_utilization_ratio": (
        "of the time in which a kernel ran",
        lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu / 100,
    ),
    "ull_gpu_throttle_reasons": (
        "NVML's bits of why clocks are held down",
        lambda n, h: n.nvmlDeviceGetCurrentClocksEventReasons(h),
    ),
}
_ECC = "ull_gpu_ecc_uncorrected"


class Gpu:
    """One device, by number. `library`: the module pynvml, or what stands in its place; None: it is looked for."""

    def __init__(self, device: int, library: Any = None) -> None:
        self._nvml, self._handle = library, None
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(device)
        except Exception:  # no module, no driver, no such device: NVML has an exception for each
            self._handle = None

    def families(self) -> Iterator[Metric]:
        """What can be read, now; what cannot is left out."""
        if self._handle is None:
            return
        for name, (meaning, read) in _GAUGES.items():
            value = self._read(read)
            if value is not None:
                yield GaugeMetricFamily(name, meaning, value=value)
        errors = self._read(
            lambda n, h: n.nvmlDeviceGetTotalEccErrors(h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_AGGREGATE_ECC)
        )
        if errors is not None:
            yield CounterMetricFamily(_ECC, "memory errors that ECC could not correct", value=errors)

    def _read(self, read: _Read) -> float | None:
        try:
            return float(read(self._nvml, self._handle))
        except Exception:  # not supported by this device, or the device is lost
            return None
