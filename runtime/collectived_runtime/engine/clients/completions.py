"""Messages to the local ranks of a generation about its instances: a pack is complete, or an instance has failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from collectived_proto.codec import verdict_to_proto
from collectived_proto.ipc import messages
from collectived_proto.types import Member, Verdict
from collectived_runtime.engine.base.arenas import ResultSlot
from collectived_runtime.engine.clients.deferred_release import DeferredReleases
from collectived_runtime.engine.clients.doorbells import Doorbells
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.program import CompiledCollective
from collectived_runtime.engine.submit.tracker import Instance

MAX_TEXT = 8 << 10  # characters
MAX_DETAILED_MEMBERS = 64  # missing or differing ranks of which a client gets the last action


class Completions:
    """Sends the local ranks of one generation the outcomes of its instances."""

    def __init__(self, generation: int, doorbells: Doorbells, deferred_releases: DeferredReleases) -> None:
        self._generation = generation
        self._doorbells = doorbells
        self._deferred_releases = deferred_releases
        self._encoded_verdict: tuple[Verdict, bytes] | None = None  # the latest verdict, as clients get it

    def send_done(
        self,
        instance: Instance,
        program: CompiledCollective,
        slot: ResultSlot | None,
        pack: int,
        last: bool,
        readers: tuple[int, ...],
    ) -> None:
        """Notify all ranks that a pack is complete: nothing of it is read or written any more.

        `readers` have its result in the slot.
        """
        number = instance.number
        if slot is not None:
            begin = slot.offset + len(program.header)
            done = messages.Completion(number, pack, last, True, slot.arena.number, begin, slot.number)
            for rank, offset in program.header_offsets.items():
                if rank in readers:
                    self._send_and_record((rank,), number, done._replace(offset=slot.offset + offset).encode())
            knowing = (
                [rank for rank in readers if rank not in program.header_offsets] if program.header_offsets else readers
            )
            self._send_and_record(knowing, number, done.encode())
        if len(readers) < len(program.receivers):  # others have it in memory of their own
            having = [rank for rank in program.receivers if rank not in readers]
            self._send_and_record(having, number, messages.Completion(number, pack, last, False).encode())
        if last and len(program.receivers) < len(instance.arrivals):
            others = [rank for rank in instance.arrivals if rank not in program.receivers]
            self._send_and_record(others, number, messages.Completion(number, pack, last, False).encode())

    def send_failure(self, local_rank: LocalRank, instance: int, verdict: Verdict) -> None:
        """Notify a rank that an instance has failed. It gets another message when no GPU uses its memory any more."""
        if self._encoded_verdict is None or self._encoded_verdict[0] is not verdict:
            self._encoded_verdict = verdict, encode_verdict(verdict)
        in_use = self._deferred_releases.register_if_in_use((self._generation, instance), local_rank)
        message = messages.encode_failed(instance, self._encoded_verdict[1], in_use)
        local_rank.record_outcome(instance, message)
        self._doorbells.send(local_rank, message)

    def track_aborted(self, instance: Instance) -> None:
        """Note the ranks of an instance that was stopped: their answers say whether a GPU still uses their memory."""
        for rank in instance.arrivals:
            self._deferred_releases.register_if_in_use(
                (self._generation, instance.number), self._doorbells.local_ranks[rank]
            )

    def _send_and_record(self, ranks: Iterable[int], instance: int, message: bytes) -> None:
        for rank in ranks:
            local_rank = self._doorbells.local_ranks[rank]
            local_rank.record_outcome(instance, message)
            self._doorbells.send(local_rank, message)


def encode_verdict(verdict: Verdict) -> bytes:
    """Encode a verdict so that it fits in one message: clients know the members, and complete them by rank."""
    crowd = len(verdict.missing) + len(verdict.differing) > MAX_DETAILED_MEMBERS

    def bare(member: Member, *, short: bool) -> Member:
        member = replace(member, host="", pid=0, device="", worker=0, label="")
        return replace(member, last_op="", last_site="", idle_seconds=0.0, stack="") if short else member

    compact = replace(
        verdict,
        message=verdict.message[:MAX_TEXT],
        members=tuple(bare(member, short=True) for member in verdict.members),
        missing=tuple(bare(member, short=crowd) for member in verdict.missing),
        differing=tuple(bare(member, short=crowd) for member in verdict.differing),
    )
    return verdict_to_proto(compact).SerializeToString()
