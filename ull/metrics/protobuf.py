"""Families in Prometheus's protobuf format, the one that carries native histograms.

https://github.com/prometheus/client_model/blob/master/io/prometheus/client/metrics.proto has the fields, and
https://prometheus.io/docs/specs/native_histograms/ what a native histogram is. Prometheus asks for this format where it
is to keep them; text has no place for them. A dozen fields are written here rather than a compiler's output kept.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from ull import wire

CONTENT_TYPE = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
SCHEMA = 3  # buckets grow by 2^(1/8): 9%
_PER_OCTAVE = 1 << SCHEMA
_TYPES = {"counter": 0, "gauge": 1, "info": 1, "unknown": 3, "histogram": 4}
_VARINT, _DOUBLE, _BYTES = 0, 1, 2


def wanted(accept: str) -> bool:
    """Whether the head of a question asks for this format."""
    return "application/vnd.google.protobuf" in accept and "io.prometheus.client.MetricFamily" in accept


def encode(metrics: Iterable[Metric]) -> bytes:
    """All families, each behind its length."""
    out = bytearray()
    for metric in metrics:
        family = b"".join(_family(metric))
        out += _varint(len(family)) + family
    return bytes(out)


def native_buckets(histogram: wire.Histogram) -> dict[int, int]:
    """Counts by index: bucket i has what is above 2^((i-1)/8) s and at most 2^(i/8) s.

    A bucket of the daemon's, at most 6% wide, falls whole into the one that holds its middle.
    """
    counts: Counter[int] = Counter()
    for upper_ns, count in histogram.buckets:
        middle_ns = max(1.0, upper_ns * (1 - 1 / 64))
        counts[math.ceil(math.log2(middle_ns * 1e-9) * _PER_OCTAVE)] += count
    return dict(sorted(counts.items()))


def _family(metric: Metric) -> Iterator[bytes]:
    kind = metric.type
    name = f"{metric.name}_total" if kind == "counter" else f"{metric.name}_info" if kind == "info" else metric.name
    yield _text(1, name)
    yield _text(2, metric.documentation)
    yield _number(3, _TYPES[kind])
    if kind == "histogram":
        yield _message(4, b"".join(_histogram(metric)))
        return
    for sample in metric.samples:
        labels = b"".join(_label(label, value) for label, value in sample.labels.items())
        field = 3 if kind == "counter" else 2
        yield _message(4, labels + _message(field, _double(1, sample.value)))


def _histogram(metric: Metric) -> Iterator[bytes]:
    """One metric: all our histograms have one set of labels."""
    labels = {key: value for key, value in metric.samples[0].labels.items() if key != "le"}
    yield from (_label(label, value) for label, value in labels.items())
    body = []
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            if bound != math.inf:
                body.append(_message(3, _number(1, int(sample.value)) + _double(2, bound)))
        elif sample.name.endswith("_count"):
            body.append(_number(1, int(sample.value)))
        elif sample.name.endswith("_sum"):
            body.append(_double(2, sample.value))
    if isinstance(native := getattr(metric, "native", None), wire.Histogram):
        body += _native(native_buckets(native))
    yield _message(7, b"".join(body))


def _native(counts: dict[int, int]) -> Iterator[bytes]:
    """Runs of buckets that follow each other, and each count as the difference from the one before."""
    yield _number(5, _zigzag(SCHEMA))
    yield _double(6, 1e-9)  # what is below is zero
    yield _number(7, 0)
    deltas: list[bytes] = []
    runs: list[list[int]] = []  # first index, length
    last = 0
    for index, count in counts.items():
        if runs and index == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
        deltas.append(_varint(_zigzag(count - last)))
        last = count
    end = 0
    for start, length in runs:
        yield _message(12, _number(1, _zigzag(start - end)) + _number(2, length))
        end = start + length
    if deltas:
        yield _message(13, b"".join(deltas))


def _label(name: str, value: str) -> bytes:
    return _message(1, _text(1, name) + _text(2, value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _DOUBLE) + struct.pack("<d", value)


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
