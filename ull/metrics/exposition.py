"""Families of metrics in the form that a monitor asks for: Prometheus's text, OpenMetrics, or protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from ull.metrics import protobuf


class _Families:
    """What prometheus_client's encoders take for a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def encode(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The families, and their content type, in the form that `accept` (of the question's head) asks for."""
    if protobuf.wanted(accept):
        return protobuf.encode(metrics), protobuf.CONTENT_TYPE
    encoder, content_type = choose_encoder(accept)
    return encoder(_Families(list(metrics))), content_type
