"""Figures become Prometheus's metrics without a count being lost or guessed."""

import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ull import wire
from ull.daemon.config import PAGE_TOKENS
from ull.daemon.metrics import LatencyHistogram
from ull.endpoints import parse_address
from ull.metrics import compat
from ull.metrics.families import BOUNDS_NS, cumulative, histogram_family
from ull.metrics.gpu import Gpu
from ull.metrics.server import encode

PAGE = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()


def test_a_histogram_of_prometheus_has_the_counts_of_the_records() -> None:
    random_ = random.Random(5)
    records = [int(math.exp(random_.uniform(math.log(100), math.log(400e9)))) for _ in range(5000)]
    histogram = LatencyHistogram()
    for record in records:
        histogram.record(record)
    buckets = histogram.histogram()["buckets"]
    # A bucket's largest value is one below a bound, so that a record of exactly a bound counts for the next.
    assert cumulative(buckets) == [sum(record < bound for record in records) for bound in BOUNDS_NS]
    told = wire.Histogram(sum=histogram.histogram()["sum"], buckets=buckets)
    (family,) = text_string_to_metric_families(
        encode([histogram_family("ull_x_seconds", "x", told, {})], "")[0].decode()
    )
    samples = {sample.name: sample.value for sample in family.samples if not sample.labels}
    assert samples["ull_x_seconds_count"] == 5000
    assert samples["ull_x_seconds_sum"] == pytest.approx(sum(records) * 1e-9)
    bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
    assert bounds == [*(bound / 1e9 for bound in BOUNDS_NS), math.inf]


def test_bounds_are_ascending_and_start_at_16_us() -> None:
    assert list(BOUNDS_NS) == sorted(set(BOUNDS_NS))
    assert BOUNDS_NS[0] < 20_000
    assert BOUNDS_NS[-1] > 120e9


class Nvml:
    """In the place of pynvml."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_AGGREGATE_ECC = 1

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 512_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=9 << 30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetTotalEccErrors": 0,
        }

        def call(*_: Any) -> Any:
            if name == self.fails:
                raise RuntimeError("not supported")
            return answers[name]

        return call


def test_what_nvml_says_is_told_in_base_units() -> None:
    values = {f.name: f.samples[0].value for f in Gpu(0, Nvml()).families()}
    assert values["ull_gpu_power_watts"] == 512
    assert values["ull_gpu_sm_clock_hertz"] == 1.98e9
    assert values["ull_gpu_utilization_ratio"] == 0.97
    assert set(re.findall(r"ull_gpu_\w+?(?=_total`|`)", PAGE)) == set(values)


def test_what_a_device_cannot_say_is_left_out() -> None:
    names = {f.name for f in Gpu(0, Nvml("nvmlDeviceGetTotalEccErrors")).families()}
    assert "ull_gpu_ecc_uncorrected" not in names
    assert "ull_gpu_power_watts" in names
    assert not list(Gpu(0, Nvml("nvmlDeviceGetHandleByIndex")).families())


@pytest.mark.parametrize("text, address", [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0))])
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "metrics.listen") == address


def test_pages_have_the_core_s_size() -> None:
    assert compat.PAGE_TOKENS == PAGE_TOKENS
