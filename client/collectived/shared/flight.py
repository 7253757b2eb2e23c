"""Calls in flight, and what the worker's messages mean for them."""

from __future__ import annotations

import os
from collections import deque

from collectived.calls.call import ALL, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.standing import Standing
from collectived.calls.turns import Turns
from collectived.shared.results import Results
from collectived_proto.local import wire
from collectived_proto.types import Verdict

_DONE = int(wire.Kind.DONE)


class Echo:
    """The answer to one PING, awaited as a call is.

    Attributes:
        verdict: what the calls in flight end with once it comes, for then the worker reads their inputs no more, or
            says that it does.
    """

    __slots__ = ("heard", "verdict")

    def __init__(self, verdict: Verdict | None) -> None:
        self.heard = False
        self.verdict = verdict

    def ready(self, packs: int = ALL) -> bool:
        return self.heard


class Flight:
    """Under its owner's lock, all of it.

    Attributes:
        calls: by instance.
        posts: how many of them are sends and recvs.
        echoes: of the PINGs that have not been answered, in order.
        returned: heard where no memory is in use of which the worker has said that it will say so.
    """

    def __init__(self, standing: Standing, turns: Turns, callbacks: Callbacks) -> None:
        self.calls: dict[int, Call] = {}
        self.posts = 0
        self.echoes: deque[Echo] = deque()
        self.results = Results()
        self._standing = standing
        self._turns = turns
        self._callbacks = callbacks
        self.returned = Echo(None)
        self.returned.heard = True
        self._retired: dict[tuple[int, int], Call] = {}  # by generation and instance, until the worker says otherwise
        self._waiting = 0  # how many wait to join, as the worker said last

    def take(self, message: bytes, descriptor: int) -> None:
        """Takes in a message of the worker.

        Raises:
            wire.Malformed, ValueError, OSError: it is not what a worker sends.
        """
        if message[0] == _DONE:
            self._done(wire.parse_done(message))
            return
        kind = wire.kind_of(message)
        if kind is wire.Kind.ARENA and descriptor >= 0:
            self.results.add(message, descriptor)
            return
        if descriptor >= 0:
            os.close(descriptor)
        if kind is wire.Kind.FAILED:
            self._failed(*wire.parse_failed(message), wire.in_use(message))
        elif kind is wire.Kind.LAUNCHED:
            self._launched(wire.parse_launched(message))
        elif kind is wire.Kind.PONG:
            self._answered(wire.in_use(message))
        elif kind is wire.Kind.FREED:
            self._freed(wire.parse_freed(message))
        elif kind is wire.Kind.WITHDRAWN:
            self.results.drop(message)
        elif kind is wire.Kind.WAITING:
            self._waiting = wire.parse_waiting(message)
        else:
            raise wire.Malformed(f"a {kind.name} on a doorbell")

    def _done(self, done: wire.Done) -> None:
        call = self.calls.get(done.instance)
        if call is None:  # given up on, and with it the generation
            retired = [number for number in self._retired if number[1] == done.instance]
            if done.last and retired:  # the worker is done with it all the same, of the latest generation that had it
                self._freed(max(retired))
            return
        prepared = call.prepared
        if done.result and call.slot is None:
            slot = self.results.slot(done)
            if prepared.form is None:
                call.slot = slot
            else:
                call.receive(slot)
        if prepared.packs and (done.last or not prepared.open):
            if call.slot is None and call.output is None and prepared.receives:
                raise wire.Malformed(f"{prepared.op} without a result")
            call.packs.append(done.pack)
        if done.last:
            self.end(call, None)
        else:
            self._turns.wake(call)

    def _launched(self, launched: wire.Launched) -> None:
        call = self.calls.get(launched.instance)
        if call is None or not call.ordered or call.launched is not None:  # it has been given up on
            self.results.give_back(launched.event)
            return
        call.waiting = self._waiting
        call.launched = launched
        self._turns.wake(call)

    def _failed(self, instance: int, serialized: bytes, in_use: bool) -> None:
        verdict = self._standing.read(serialized)
        if in_use:
            self.returned.heard = False
        else:
            self._freed((verdict.generation, instance))
        self._standing.decided(verdict)
        for call in list(self.calls.values()):
            # A send or recv ends by its own number only: until then the worker may be reading its input.
            covered = verdict.from_instance <= call.instance < wire.POST or call.instance == instance
            if call.generation == verdict.generation and covered:
                self.end(call, verdict, retire=in_use and call.instance == instance)

    def _freed(self, number: tuple[int, int]) -> None:
        """The worker reads and writes nothing of that generation and instance any more."""
        retired = self._retired.pop(number, None)
        if retired is not None:
            retired.restore()
        if not self._retired:
            self.returned.heard = True
            self._turns.wake(self.returned)

    def _answered(self, in_use: bool) -> None:
        if not self.echoes:
            return
        echo = self.echoes.popleft()
        echo.heard = True
        self._turns.wake(echo)
        if echo.verdict is not None:
            self.returned.heard &= not in_use
            self.end_all(echo.verdict, retire=in_use)

    def end_all(self, verdict: Verdict, retire: bool = False) -> None:
        """Ends every call; with `retire`, the worker may still be reading their inputs."""
        for call in list(self.calls.values()):
            self.end(call, verdict, retire)

    def end(self, call: Call, verdict: Verdict | None, retire: bool = False) -> None:
        """Ends a call; with `retire`, the worker may still be reading its inputs."""
        del self.calls[call.instance]
        if retire:
            self._retired[call.generation, call.instance] = call
        self.posts -= call.prepared.post
        call.waiting = self._waiting
        if call.launched is not None:
            self.results.give_back(call.launched.event)
        self._standing.ended(call, verdict)
        call.end(verdict, retire)
        self._turns.wake(call)
        self._callbacks.ended(call)
        if self.echoes and not self.calls:  # who awaits that nothing is in flight any more need not wait longer
            for echo in self.echoes:
                if echo.verdict is not None:
                    echo.heard = True
                    self._turns.wake(echo)
