"""Records of the collectives of one group loop: counters, rates and the flight recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collectived_proto.types import Operation, Verdict
from collectived_runtime.engine.record.counters import OPERATIONS, SEGMENT, Counters
from collectived_runtime.engine.record.flight_recorder import GroupRecorder, ProgramSummary
from collectived_runtime.engine.record.rates import OperationLoad, RateWindow
from collectived_runtime.engine.record.segment_history import PastInstance
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.engine.submit.tracker import Instance


@dataclass(frozen=True, slots=True)
class GroupRecords:
    """Written by one group loop alone; counters and rates may be read from any thread."""

    counters: Counters
    rates: RateWindow
    recorder: GroupRecorder

    def record_completed(
        self, generation: int, instance: Instance, summary: ProgramSummary, load: OperationLoad, now: float
    ) -> None:
        """A collective has completed on this worker."""
        counters, operation, first = self.counters, instance.collective.operation, instance.first_arrival.arrived_at
        counters.done += 1
        counters.result_bytes += summary.nbytes
        counters.count_completed(operation, summary.algorithm, summary.nbytes, now - first)
        counters.observe_wait(operation, instance.last_arrival.arrived_at - first)
        self.rates.add(load, first, instance.started_at, now)
        self.recorder.record_completed(generation, instance, summary, now)

    def record_many(self, count: int, sums: OperationLoad, seconds: float, now: float) -> None:
        """Record completed collectives of one operation in a segment: their number, sums of loads, and seconds."""
        self.counters.done += count
        self.counters.result_bytes += sums.nbytes
        self.counters.count_many(sums.op, SEGMENT, count, sums.nbytes, seconds)
        self.rates.add_many(count, sums, seconds, now)

    def record_crossings(
        self,
        count: int,
        operation: Operation,
        summary: ProgramSummary,
        load: OperationLoad,
        seconds: float,
        uneven: float,
        now: float,
    ) -> None:
        """So many collectives of one program have completed without the group loop.

        Args:
            seconds: of all, from the first arrival to the end. uneven: to the last arrival.
        """
        self.counters.done += count
        self.counters.result_bytes += count * summary.nbytes
        name = OPERATIONS[type(operation)]
        self.counters.count_many(name, summary.algorithm, count, count * summary.nbytes, seconds)
        self.counters.observe_waits(operation, count, uneven)
        sums = OperationLoad(load.op, count * load.nbytes, count * load.bus_bytes)
        self.rates.add_many(count, sums, seconds - uneven, now, waiting=uneven)

    def record_past(self, generation: int, past: PastInstance, described: Sequence[PreparedCollective | None]) -> None:
        """A collective that `record_many` counts, as its ranks remember it; `described`: by each of its arrivals."""
        known = next((one for one in described if one is not None), None)
        if known is not None:
            self.counters.observe_wait(known.collective.operation, past.arrivals[-1].at - past.arrivals[0].at)
            summary = ProgramSummary(SEGMENT, sum(known.leaf_bytes))
            sites = tuple("" if one is None else one.collective.site for one in described)
            self.recorder.record_past(generation, past, known.op, summary, sites)

    def record_failed(
        self, generation: int, instance: Instance, verdict: Verdict, summary: ProgramSummary, algorithm: str
    ) -> None:
        """A collective has failed by that verdict; `algorithm` carried it out, or is `NOT_STARTED`."""
        self.counters.failed += 1
        self.counters.count_failure(instance.collective.operation, algorithm, verdict.code)
        self.recorder.record_failed(generation, instance, summary, verdict)
