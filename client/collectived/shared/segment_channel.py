"""A rank whose collectives the ranks of its host carry out by themselves, in a segment of shared memory.

The segment alone says whether an instance is complete. The doorbell beside it carries what is rare: an abort, the words
of a verdict, a send or receive that has waited for a while, so that the worker reports it and watches its deadline.
Where the segment says that nothing completes any more, this rank asks its worker for the verdict, which is the same for
all ranks.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.prepare import PreparedCall
from collectived.errors import DeadlineExceededError, InternalError, UnavailableError
from collectived.shared import seqpacket
from collectived.shared.doorbell import Doorbell
from collectived.shared.segment_call import STOP_NANOSECONDS, PointToPointCall, SegmentCall
from collectived.shared.segment_describer import Describer
from collectived.shared.segment_engines import SegmentEngines
from collectived.shared.segment_letters import Announcements, LetterCall
from collectived.shared.segment_program import SegmentProgram
from collectived.shared.segment_reasons import word_end
from collectived.shared.segment_repeats import Repeats, Unfinished
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_native import core
from collectived_proto.across import LocalSeats
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.rows import lacks_axis
from collectived_proto.types import GroupInfo, Operation, Verdict

_VERDICT_TIMEOUT = 2.0  # seconds in which a worker that lives says why nothing completes any more
_LATE_VERDICT_TIMEOUT = 0.09  # the same where the call's deadline has passed, which the worker has noticed before
_LOOK_INTERVAL = 0.001  # seconds between two looks at the packs of a call that are complete, or at a cancel
_NONSENSE_SECONDS = 1.0  # after which a rank no longer waits for what its segment says of a deadline


class SegmentChannel(Doorbell):
    """One rank's place in the segment of its generation, with its doorbell."""

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        super().__init__(sock, group, rank, worker)
        self._in_flight.on_segment = self._on_segment
        self._size = group.size
        self._engines = SegmentEngines(LocalSeats.beside(rank, group))
        self._describing = threading.Lock()
        self._post_numbers = count(messages.P2P_BASE)
        self._repeats = Repeats(self.rank_state, self._post_numbers)
        self.repeat = self._repeats.run
        self._collectives: WeakValueDictionary[int, SegmentCall] = WeakValueDictionary()  # of those in flight
        self._posted: WeakValueDictionary[core.Job, LetterCall] = WeakValueDictionary()  # those that are asynchronous
        self._announcements = Announcements(self.mutex, self._send_now)
        self._describer = Describer(
            self.mutex, self._announcements, self._find_running, self._collect, self._on_own_failure
        )

    def await_segment(self, timeout: float) -> core.Engine | None:
        """Return this rank's engine in the current generation, None where its ranks do not meet in a segment.

        The worker says so unasked.

        Raises:
            UnavailableError: it does not come in time, or the worker is lost.
        """
        end = monotonic() + timeout
        while (engine := self._engines.get(self.rank_state.generation)) is None and not self._engines.is_declined:
            if (verdict := self.rank_state.verdict) is not None:  # there was no memory for it, say
                raise self.report_verdict(verdict)
            if self._is_lost or not self._read_once(end):
                raise UnavailableError(
                    f"{self._worker} has not said within {timeout:g} s where the ranks of group "
                    f"{self.rank_state.group.name!r} meet; is it stopped?"
                )
        return engine

    def make_call(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> Call:
        if self._engines.is_declined:
            return super().make_call(prepared, arrays, located, spec)
        return (LetterCall if prepared.is_p2p else SegmentCall)(prepared, arrays, spec)

    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        if not isinstance(call, SegmentCall):
            return super()._try_submit(call, deadline, addresses)
        if self.rank_state.verdict is not None:
            call.end(self.rank_state.verdict)
            return True
        engine = self._require_engine(deadline)
        if isinstance(call, LetterCall):
            return self._post(call, engine, deadline)
        if lacks_axis(call.prepared.collective):
            self._dispute(call, engine)
            return True
        program = call.prepared.segment_program
        if not isinstance(program, SegmentProgram) or program.engine is not engine:
            program = SegmentProgram(engine, call.prepared, self.rank_state.rank, self._size, self._engines.local)
            call.prepared.segment_program = program
        self._start(call, engine, program, deadline)
        return True

    def _require_engine(self, deadline: Deadline | None) -> core.Engine:
        """Return this rank's engine in the current generation, which may have begun just now, or raise."""
        engine = self._engines.get(self.rank_state.generation)
        if engine is None:
            left = math.inf if deadline is None else deadline.remaining()
            engine = self.await_segment(min(left, _VERDICT_TIMEOUT))
        if engine is None:
            raise UnavailableError(f"{self._worker} cannot let the ranks of this group go on in shared memory; rejoin")
        return engine

    def _dispute(self, call: SegmentCall, engine: core.Engine) -> None:
        """End a collective that fails on all ranks, whatever the others submit; the worker says why."""
        for earlier in list(self._calls.values()):
            self._wait_until_done(earlier)
        with self.mutex:
            call.assign_instance(self.rank_state.generation, engine.next_instance())
            self._calls[call.instance] = call
        engine.abort(core.MISMATCH, self._engines.seat)
        self._fail(call, core.MISMATCH)

    def _start(
        self, call: SegmentCall, engine: core.Engine, program: SegmentProgram, deadline: Deadline | None
    ) -> None:
        plan, asked = program.first.plan, int(call.timeout * 1e9)
        inputs, outputs = call.make_buffers(program.first)
        nanoseconds = 0 if deadline is None else int(deadline.remaining() * 1e9)
        if deadline is not None and not nanoseconds:
            raise DeadlineExceededError("its time was over before it could be submitted")
        call.assign_instance(self.rank_state.generation, engine.next_instance())  # from here on it may have its number
        if call.is_async:
            job = engine.submit(plan, inputs, outputs, nanoseconds, program.blob, program.may_describe, asked)
        else:
            started = engine.run(plan, inputs, outputs, nanoseconds, program.blob, asked)
            if started is None:  # the call has ended, and no other thread knows of it
                self.rank_state.next_instance = engine.next_instance()
                call.waiting = engine.waiting()
                call.end()
                return
            job = started
        self._adopt(call, job, engine)
        if call.is_async and program.may_describe:
            self._describer.start()

    def resume(
        self, unfinished: Unfinished, operation: Operation, value: Any, out: Any, frame: FrameType | None
    ) -> Call:
        repeat, form, seen, result, job = unfinished
        call = repeat.make_call(form, seen, result, out)
        begun = call.form
        self._adopt(call, job, repeat.program.engine)
        if frame is not None:
            self.wait(call)
            if call.verdict is None and call.form is not begun:  # something else has come than before
                self._repeats.add(call, operation, value, frame)
        return call

    def remember(self, call: Call, operation: Operation, value: Any, frame: FrameType) -> None:
        self._repeats.add(call, operation, value, frame)

    # Sends and receives

    def _post(self, call: LetterCall, engine: core.Engine, deadline: Deadline | None) -> bool:
        """Start a send or receive; False, and nothing is done, where there is no room."""
        with self.mutex:
            if not self._has_room(True):
                return False
            call.assign_instance(self.rank_state.generation, next(self._post_numbers))  # it may be on its way
        job = call.start(engine, 0 if deadline is None else max(int(deadline.remaining() * 1e9), 1))
        if job is None:
            call.end()
        else:
            self._adopt(call, job, engine)
        return True

    def _on_letter_there(self, call: LetterCall) -> None:
        """All of a letter has been sent, or received."""
        try:
            with self._describing:
                call.unpack()
        except (MemoryError, ValueError) as error:
            self._refuse(error)
        self._end_letter(call, None, messages.Completion(call.instance, 0, True, False).encode())

    def _on_withdrawn(self, call: PointToPointCall, code: Code) -> None:
        """A receive has ended alone, and has taken nothing."""
        told = messages.Withdrawal(call.generation, call.instance, code).encode()
        self._end_letter(call, self.rank_state.make_withdrawal(call, code), told)

    def _end_letter(self, call: PointToPointCall, verdict: Verdict | None, told: bytes) -> None:
        """End a send or receive, and report that to the worker if it knows that the call waits."""
        with self.mutex:
            ended, job = not call.complete, call.job
            if job is not None and verdict is None:
                call.source = job.source()
            self._end_call(call, verdict)
        if ended and call.is_announced and not self._send(told, call):
            with self.mutex:
                self._mark_lost("it takes no more messages")

    def _request_cancel(self, call: Call) -> None:
        if not isinstance(call, LetterCall):
            super()._request_cancel(call)
        elif (job := call.job) is not None:
            call.is_cancelled = True
            job.cancel()

    def _await_cancel(self, call: Call) -> None:
        if not isinstance(call, LetterCall):
            super()._await_cancel(call)
            return
        while not call.complete and (job := call.job) is not None and job.source() < 0:
            self.wait(call, until=monotonic() + _LOOK_INTERVAL)

    def _adopt(self, call: SegmentCall, job: core.Job, engine: core.Engine) -> None:
        """Look after a call that has not completed at once."""
        call.job = job
        self._last_received = monotonic()  # the silence of the worker that counts begins now
        with self.mutex:
            if not isinstance(call, LetterCall):
                call.assign_instance(self.rank_state.generation, job.instance())
            elif call.instance < 0:
                call.assign_instance(self.rank_state.generation, next(self._post_numbers))
            self.rank_state.next_instance = engine.next_instance()
            self._calls[call.instance] = call
            if not isinstance(call, LetterCall):
                self._collectives[call.instance] = call
            elif call.is_async:
                self._posted[job] = call
        if isinstance(call, LetterCall):
            self._look_after(call, job, engine)

    def _look_after(self, call: LetterCall, job: core.Job, engine: core.Engine) -> None:
        """Announce a send or receive to the worker, and go on with it even if no thread waits for it."""
        state = job.state()
        if state in (core.COMPLETE, core.DESCRIBE, core.EXPIRED):
            self._on_state(call, job, state)
        elif not call.is_async:  # it has waited for a while
            self._announcements.announce(call)
        if call.is_async and not call.complete:
            self._announce_later(call)

    def _announce_later(self, call: PointToPointCall) -> None:
        """Announce a send or receive that no thread waits for, once it has waited for a while."""
        rests = self._announcements.add(call)
        if not self._describer.start() and rests:
            self._announcements.announce_young()

    def _handle(self, message: bytes, descriptor: int) -> Exception | None:
        self._count_instances()
        with contextlib.suppress(messages.MalformedMessage):  # it is refused below
            if messages.parse_type(message) is messages.MessageType.FAILED:
                self._receive_last(messages.parse_failed(message)[0])
        return super()._handle(message, descriptor)

    def _receive_last(self, instance: int) -> None:
        """Take in what the segment holds for a receive that ends by a verdict: what was sent before that counts."""
        call = self._calls.get(instance)
        while isinstance(call, LetterCall) and not call.complete and (job := call.job) is not None:
            state = call.await_last(job)
            if state not in (core.COMPLETE, core.DESCRIBE):
                return
            self._on_state(call, job, state)

    def _count_instances(self) -> None:
        """Say which instance is next: those that complete at once are not counted one by one."""
        if (engine := self._engines.get(self.rank_state.generation)) is not None:
            self.rank_state.next_instance = engine.next_instance()

    # Waiting

    def _wait(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        if not isinstance(call, SegmentCall):
            super()._wait(call, packs, until, look)
            return
        try:
            while not call.is_ready(packs):
                self.check_usable()
                look(call)
                job = call.job
                if job is None or call.complete:  # another thread is ending it
                    self._leader_follower.wait_as_follower(call, packs, until)
                else:
                    is_letter = isinstance(call, LetterCall)
                    is_send = is_letter and not call.prepared.receives
                    left = (min(until, call.cutoff) if is_send else until) - monotonic()
                    if packs != ALL_PACKS and not is_letter:
                        left = min(left, _LOOK_INTERVAL)
                    self._on_state(call, job, job.wait(-1 if left == math.inf else max(0, int(left * 1e9))))
                    call.count_packs()
                    # Of all others the core watches the deadline, as far as no member writes nonsense into its memory.
                    if is_send or monotonic() >= call.cutoff + _NONSENSE_SECONDS:
                        self._check_cutoff(call)
                if until != math.inf and monotonic() >= until:
                    return
            call.await_release()
        except KeyboardInterrupt:
            self.on_interrupt()
            raise

    def _on_state(self, call: SegmentCall, job: core.Job, state: int) -> None:
        """React to what has become of a job."""
        if state == core.COMPLETE:
            if isinstance(call, LetterCall):
                self._on_letter_there(call)
            else:
                with self.mutex:
                    self._end_call(call, None)
            self.callbacks.dispatch()
        elif state == core.DESCRIBE:
            self._describe(call, job)
        elif isinstance(call, LetterCall) and (code := call.find_withdrawal(state)) is not None:
            self._on_withdrawn(call, code)
            self.callbacks.dispatch()
        elif state == core.DETACHED:  # by another thread, which leaves the group or closes the session
            with self.mutex:
                self._end_call(call, self.rank_state.on_group_left())
            self.callbacks.dispatch()
        elif state == core.BY_DOORBELL:
            self._hear(call)
        elif state > 0:
            self._fail(call, state)
        else:
            if state == core.KNOCK and isinstance(call, LetterCall):
                self._announcements.announce(call)
            super().poll()
            if call.cutoff == math.inf and not call.complete and monotonic() >= self._next_ping():
                self._ping()

    def _end_call(self, call: SegmentCall, verdict: Verdict | None) -> None:
        """Unless it has ended: then its number may be that of a call of a later generation. Under the mutex."""
        if self._calls.get(call.instance) is not call:
            return
        call.count_packs()
        self._in_flight.end(call, verdict)
        self._collectives.pop(call.instance, None)
        if call.job is not None:
            call.waiting = call.job.waiting()
        if not call.is_running:
            call.job = None

    def poll(self) -> None:
        super().poll()
        engine = self._engines.get(self.rank_state.generation)
        if self._posted and engine is not None:
            self._collect(engine, 0)
        for call in list(self._collectives.values()):
            if (job := call.job) is not None and (state := job.state()) in (core.COMPLETE, core.DESCRIBE):
                self._on_state(call, job, state)

    def _collect(self, engine: core.Engine, nanoseconds: int) -> None:
        """Go on with calls that are done, or need to be described, though no thread waits for them."""
        for job in engine.collect(nanoseconds):
            letter = self._posted.get(job)
            call = self._calls.get(job.instance()) if letter is None else letter
            state = job.state()
            if not isinstance(call, SegmentCall) or call.job is not job:
                continue
            if state == core.DESCRIBE:
                self._describe(call, job)
            elif letter is not None and state in (core.COMPLETE, core.NO_ROOM, core.EXPIRED, core.CANCELLED):
                self._on_state(call, job, state)
            elif letter is not None and state > 0:
                self._announcements.announce(letter)  # the worker says why

    def _describe(self, call: SegmentCall, job: core.Job) -> None:
        """Go on with a call whose lengths or structure the other ranks have published."""
        with self._describing:
            if job.state() != core.DESCRIBE:  # another thread was quicker
                return
            try:
                call.describe(job)
            except BaseException as error:
                self._engines[call.generation].abort(core.FAILED, self._engines.seat)
                if not isinstance(error, (MemoryError, ValueError)):
                    raise
                self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.abort(f"rank {self.rank_state.rank} cannot take what comes: {error or 'out of memory'}")

    def _hear(self, call: SegmentCall) -> None:
        """Wait for the worker's doorbell message about a call whose value has come."""
        raise InternalError(f"{call.prepared.op} has been carried out by {self._worker}, which has no part in it")

    def _find_running(self, is_busy: bool) -> core.Engine | None:
        """The engine in which asynchronous calls may need to be gone on with, or soon may. Under the mutex."""
        is_busy = is_busy or any(call.is_running for call in self._calls.values())
        return self._engines.get(self.rank_state.generation) if is_busy else None

    # The end of a generation

    def _fail(self, call: SegmentCall, reason: int) -> None:
        """Nothing completes any more from this call's instance on: ask the worker for the verdict."""
        if reason == core.WORKER:
            super().poll()
            with self.mutex:  # unless it has closed the connection
                self._mark_lost("it does not answer another rank of this host")
            self.callbacks.dispatch()
            return
        if reason == core.NO_ROOM:
            verdict = word_end(self.rank_state, call, reason, self._engines.seat, self._worker)
            self._end_generation(verdict, self._cutoff_ack_timeout)
            return
        if isinstance(call, LetterCall):
            job = call.job
            if reason == core.DEADLINE and call.prepared.receives and job is not None and job.source() >= 0:
                self._announcements.announce_overdue(call, job.source())
            self._announcements.announce(call)
            sent = call.is_announced
        else:
            asked = messages.Submit(call.generation, call.prepared.id, call.instance, 0.0, False, ())
            sent = seqpacket.send(self._socket, asked.encode(), _LATE_VERDICT_TIMEOUT)
        end = now = monotonic()
        if sent:  # where the coordinator is away, the worker decides alone a little later
            end = max(now + _LATE_VERDICT_TIMEOUT, min(now + _VERDICT_TIMEOUT, call.cutoff))
        while not call.complete and not self._is_lost and self._read_once(end):
            pass
        with self.mutex:
            if not call.complete:
                known = self.rank_state.verdict
                culprit = self._engines[call.generation].verdict()[2]
                verdict = known or word_end(self.rank_state, call, reason, culprit, self._worker)
                self.rank_state.apply_verdict(verdict)
                self._end_call(call, verdict)
        self.callbacks.dispatch()

    def _on_silence(self, why: str) -> None:
        if (engine := self._engines.get(self.rank_state.generation)) is not None:
            # Nothing completes any more in the segment, either: what the caller gets back must not be written to.
            engine.abort(core.WORKER, core.WORKER_SEAT)
            self._await_jobs()
            self.poll()  # calls that had completed by then have done so for all ranks
        super()._on_silence(why)

    def _end_generation(self, verdict: Verdict, within: float) -> None:
        self._count_instances()
        engine = self._engines.get(self.rank_state.generation)
        if engine is not None:
            interrupted = self.rank_state.interrupted_generation == self.rank_state.generation
            engine.abort(core.INTERRUPTED if interrupted else core.ABORTED, self._engines.seat)
        try:
            self._await_jobs()
        finally:
            super()._end_generation(verdict, within)

    def _await_jobs(self) -> None:
        """Wait until the core reads and writes nothing of the caller's any more; the generation is over."""
        jobs = [job for call in list(self._calls.values()) if isinstance(call, SegmentCall) and (job := call.job)]
        for job in jobs:
            job.abandon()
        for job in jobs:
            job.wait(STOP_NANOSECONDS)

    def _give_up(self, call: Call, verdict: Verdict) -> None:
        if not isinstance(call, SegmentCall):
            super()._give_up(call, verdict)
            return
        if call is self._collectives.get(call.instance) and self._engines.limit(call.generation, call.instance):
            # Others must not take the value for what it was, nor does anything behind it complete.
            for behind in [one for number, one in self._collectives.items() if number > call.instance]:
                self._end_call(behind, verdict)
        self._end_call(call, verdict)

    def cancel(self, why: str, aborts: bool) -> None:
        super().cancel(why, aborts)
        with self.mutex:
            self._engines.rouse()

    def detach(self) -> None:
        """Let go of the segment; before the socket is closed, at which the core looks."""
        self._engines.detach()

    def _close(self) -> None:
        self._engines.leave()
        if (engine := self._engines.get(self.rank_state.generation)) is not None:
            self.rank_state.last_finished = max(self.rank_state.last_finished, engine.verdict()[0] - 1)
        self.detach()
        super()._close()

    def invalidate_after_fork(self, why: str) -> None:
        super().invalidate_after_fork(why)
        self._engines.forget()

    def _on_segment(self, message: bytes, descriptor: int) -> None:
        """Under the mutex."""
        self._engines.take_in(message, descriptor, self.rank_state.generation, self._socket.fileno())
