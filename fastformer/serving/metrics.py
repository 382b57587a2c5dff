"""Counters and times for Prometheus. Routes are named by their templates, never by a path from a client."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastformer.generation.jobs import QUEUE_BOUNDS
from fastformer.serving.service import Service

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The session's numbers: the name in `SessionStats`, fastformer's name of the metric, and its description.
_GAUGES = (
    ("running", "requests_running", "Requests in the batch."),
    ("waiting", "requests_waiting", "Requests in front of the batch."),
    ("waiting_tokens", "waiting_tokens", "Tokens of the sources and prompts that wait."),
    ("rows", "batch_rows", "Rows of the batch."),
    ("free_tokens", "cache_free_tokens", "Tokens of the cache that are free."),
    ("capacity_tokens", "cache_tokens", "Tokens of the cache."),
)
_COUNTERS = (
    ("read_tokens", "prompt_tokens", "Tokens of sources and prompts that were read."),
    ("cached_tokens", "cached_tokens", "Tokens of prompts that had been read before."),
    ("new_tokens", "new_tokens", "Tokens of answers."),
    ("drafted_tokens", "drafted_tokens", "Tokens of answers that were drafted."),
    ("accepted_tokens", "accepted_draft_tokens", "Tokens of answers that were drafted rightly."),
    ("cancelled", "cancelled", "Calls whose client has left."),
    ("steps", "steps", "Steps of the thread that decodes."),
    ("step_seconds", "step_seconds", "Seconds that they took."),
)
_REASONS = {429: "full", 413: "large", 401: "key", 503: "ending", 504: "late"}


class Metrics:
    """The collectors of one application.

    Args:
        service: its counters are read when Prometheus asks.
    """

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "fastformer_requests", "Requests that were answered.", ("route", "code"), registry=self._registry
        )
        self._rejected = Counter(
            "fastformer_rejected", "Requests that were refused.", ("reason",), registry=self._registry
        )
        self._seconds = Histogram(
            "fastformer_request_seconds", "Until the end of the answer.", ("route",), buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._first = Histogram(
            "fastformer_time_to_first_byte_seconds", "Until the first byte of the answer.", ("route",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._registry.register(_SessionStats(service))
        self._of = functools.cache(self._labelled)

    def answered(self, route: str, status: int, seconds: float, first: float) -> None:
        """Records a request with its time in seconds and the time until its first byte, 0 if none was sent."""
        count, whole, begun, rejected = self._of(route, status)
        count.inc()
        whole.observe(seconds)
        if first:
            begun.observe(first)
        if rejected is not None:
            rejected.inc()

    def _labelled(self, route: str, status: int) -> tuple[Counter, Histogram, Histogram, Counter | None]:
        """Returns the collectors for a route and a status, which are slow to look up."""
        rejected = self._rejected.labels(_REASONS[status]) if status in _REASONS else None
        seconds, first = self._seconds.labels(route), self._first.labels(route)
        return self._requests.labels(route, str(status)), seconds, first, rejected

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _SessionStats(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        stats = self._service.session.stats()
        for name, ours, what in _GAUGES:
            yield GaugeMetricFamily(f"fastformer_{ours}", what, value=getattr(stats, name))
        for name, ours, what in _COUNTERS:
            yield CounterMetricFamily(f"fastformer_{ours}", what, value=getattr(stats, name))
        sums = list(itertools.accumulate(stats.queue_counts))
        yield HistogramMetricFamily(
            "fastformer_queue_seconds", "Until a request that has ended left the queue.",
            buckets=list(zip((*map(floatToGoString, QUEUE_BOUNDS), "+Inf"), sums, strict=True)),
            sum_value=stats.queue_seconds,
        )  # fmt: skip

    def describe(self) -> Iterable[Any]:
        return []
