"""The page that is scraped: families of samples as text, made in short stretches.

Beside it group loops run in the same interpreter, so no code may run for long at once: a page is made of *pieces*, and
its maker lets others go first after each. Samples are read lazily, one by one, for the same reason.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from collectived_proto.types import RELEASE
from collectived_runtime.auth.credentials import REJECT_REASONS, SURFACES, RejectReason, Surface
from collectived_runtime.limits.rejections import Limit, MessageSource
from collectived_runtime.metrics.catalogue import BUILD, LIMITED, MALFORMED, PROCESS_METRICS, REFUSED, Metric

SAMPLES_PER_CHUNK = 50  # samples that are written in one stretch: a few tenths of a millisecond
_EOF = b"# EOF\n"

Reading = tuple[Metric, Iterable[Sample]]
PAUSE = None  # read where some thinking has been done and others should go first
Labels = Sequence[str]  # in order of `Metric.labels`


class MetricsSource(Protocol):
    """The metrics of a daemon."""

    def read(self) -> Iterator[Reading | None]:
        """Every metric once, with its samples of now, and pauses; numbers may be of slightly different moments."""


class Durations(Protocol):
    """A histogram as it is read: how many lie in each bucket alone, the last of them beyond all bounds, and the sum."""

    counts: list[int]
    seconds: float


def make_reading(metric: Metric, values: Iterable[tuple[Labels, float]]) -> Reading:
    """Return a reading of a counter or a gauge."""
    return metric, (
        Sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value) for labels, value in values
    )


def make_histogram_reading(
    metric: Metric, bounds: Sequence[float], values: Iterable[tuple[Labels, Durations]]
) -> Reading:
    return metric, _histogram_samples(metric, (*map(floatToGoString, bounds), "+Inf"), values)


def _histogram_samples(
    metric: Metric, bounds: Sequence[str], values: Iterable[tuple[Labels, Durations]]
) -> Iterator[Sample]:
    for labels, durations in values:
        named = dict(zip(metric.labels, labels, strict=True))
        total = durations.seconds
        below = list(accumulate(list(durations.counts)))
        for bound, count in zip(bounds, below, strict=True):
            yield Sample(f"{metric.name}_bucket", {**named, "le": bound}, count)
        yield Sample(f"{metric.name}_count", named, below[-1])
        yield Sample(f"{metric.name}_sum", named, total)


def read_build_info(component: str) -> Reading:
    return make_reading(BUILD, [((component, RELEASE, platform.python_version()), 1.0)])


def read_auth_rejections(component: str, counts: Mapping[tuple[Surface, RejectReason], int]) -> Reading:
    """Count callers who were turned away."""
    ways = (
        (surface, reason)
        for surface in SURFACES
        for reason in REJECT_REASONS
        if (surface, reason) != ("http", "viewing")
    )
    return make_reading(REFUSED, (((component, *way), float(counts.get(way, 0))) for way in ways))


def read_limit_refusals(component: str, limited: Mapping[Limit, int], limits: Iterable[Limit] = Limit) -> Reading:
    """Count what limits have refused."""
    return make_reading(LIMITED, (((component, limit), float(limited.get(limit, 0))) for limit in limits))


def read_malformed(
    component: str, counts: Mapping[MessageSource, int], places: Iterable[MessageSource] = MessageSource
) -> Reading:
    """Count what was no message of its protocol."""
    return make_reading(MALFORMED, (((component, where), float(counts.get(where, 0))) for where in places))


_PROCESS = ProcessCollector(registry=None)


def read_process() -> Iterator[Reading]:
    """Read what the kernel says of this process."""
    for family in _PROCESS.collect():
        for sample in family.samples:
            if sample.name in PROCESS_METRICS:
                yield PROCESS_METRICS[sample.name], [sample]


class _SingleFamilyCollector(Collector):
    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return (self._family,)


def render_chunks(source: MetricsSource, encode: Callable[[Collector], bytes]) -> Iterator[bytes]:
    """The page, piece by piece.

    Args:
        encode: as `prometheus_client.exposition.choose_encoder` gives it.
    """
    ended = False
    for reading in source.read():
        if reading is PAUSE:
            yield b""
            continue
        metric, samples = reading
        rest, head = iter(samples), b""
        while some := list(islice(rest, SAMPLES_PER_CHUNK)):
            text = encode(_SingleFamilyCollector(_make_family(metric, some)))
            ended |= text.endswith(_EOF)
            text = text.removesuffix(_EOF)
            if not head:
                head = b"".join(line for line in text.splitlines(keepends=True) if line.startswith(b"#"))
                yield text
            else:
                yield text.removeprefix(head)
    if ended:
        yield _EOF


def _make_family(metric: Metric, samples: list[Sample]) -> Family:
    family = Family(metric.family, metric.help, metric.kind)
    family.samples = samples
    return family
