"""An instance under way: its strands by channel, stepped whenever what they wait for is there."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from collectived_runtime.engine.ledger import Instance
from collectived_runtime.engine.links import Links
from collectived_runtime.engine.program import Program, Strand
from collectived_runtime.engine.recorder import MOST_MARKS, PRELUDE, STRAND
from collectived_runtime.engine.results import Slot
from collectived_runtime.engine.strand import Wait
from collectived_runtime.engine.stream_order import Finale
from collectived_runtime.transport.link import Link

Start = Callable[[Strand, dict[int, Link]], Iterator[Wait]]


@dataclass(slots=True)
class _Active:
    strand: Strand
    generator: Iterator[Wait]
    links: frozenset[Link]  # its own as long as it runs: nobody else reads or writes them
    began: float
    wait: Wait = ()


class Running:
    """`start` makes the generator of a strand once its links are there.

    `then` is what follows where this is a stage before the program itself. `readers` are the ranks that read the result
    in `slot`; all other ranks that receive one have it written into memory of their own. `finale` tells those of them
    that go on in stream order.
    """

    def __init__(
        self,
        instance: Instance,
        program: Program,
        slot: Slot | None,
        start: Start,
        then: Callable[[], None] | None = None,
        readers: tuple[int, ...] = (),
        finale: Finale | None = None,
    ) -> None:
        self.instance = instance
        self.readers = readers
        self._finale = finale
        self.program = program
        self.slot = slot
        self.then = then
        self.told = False  # of a pack: from then on its receivers hold the slot until they release it
        self._left = dict(program.strands_per_pack)  # how many of each pack have not ended
        self._start = start
        self._queues = {channel: list(queue) for channel, queue in program.queues}
        self._active: dict[int, _Active] = {}

    def step(self, links: Links) -> tuple[list[Strand], bool]:
        """Steps what can go on.

        Returns the strands that ended, and whether anything wants to be stepped again at once.

        Raises:
            LinkBroken: a peer is gone.
        """
        ended: list[Strand] = []
        again = False
        for channel, queue in self._queues.items():
            active = self._active.get(channel)
            if active is None:
                if not queue or (found := links.get(queue[0].peers, channel)) is None:
                    continue
                strand = queue.pop()
                active = self._active[channel] = _Active(
                    strand, self._start(strand, found), frozenset(found.values()), time.monotonic()
                )
            elif active.wait and not any(
                one in links.ready if isinstance(one, Link) else one.done for one, _ in active.wait
            ):
                continue
            try:
                active.wait = next(active.generator)
            except StopIteration:
                del self._active[channel]
                ended.append(active.strand)
                self._mark(active)
                again |= bool(queue)
            else:
                again |= not active.wait
        return ended, again

    def _mark(self, active: _Active) -> None:
        marks = self.instance.marks
        if len(marks) < MOST_MARKS:
            kind = STRAND if self.then is None else PRELUDE
            strand = active.strand
            marks.append((kind, strand.pack_number, strand.shard, 0, -1, active.began, time.monotonic()))

    @property
    def waited_for(self) -> tuple[int, ...]:
        """The workers from which something is to come; may be read from any thread."""
        waits = [one for active in list(self._active.values()) for one in active.wait]
        return tuple(sorted({one.peer for one, event in waits if isinstance(one, Link) and event & select.POLLIN}))

    def ended(self, strand: Strand) -> tuple[bool, bool]:
        """Takes note of a strand's end: whether its pack is complete, and whether that was the last pack."""
        self._left[strand.pack_number] -= 1
        if self._left[strand.pack_number]:
            return False, False
        del self._left[strand.pack_number]
        if not self._left:
            self._close()
        return True, not self._left

    def _close(self) -> None:
        if self._finale is not None:
            self._finale.close()

    @property
    def packs_left(self) -> int:
        """May be read from any thread."""
        return len(self._left)

    def uses(self) -> dict[Link, int]:
        """The links of the strands that run, with the poll events that each is waited for with (0: none now).

        A strand that wants to be stepped again may be amid a frame of any of its links: nobody else is to read there.
        """
        events: dict[Link, int] = {}
        for active in self._active.values():
            events.update(dict.fromkeys(active.links, 0 if active.wait else select.POLLIN))
            for one, event in active.wait:
                if isinstance(one, Link):
                    events[one] |= event
        return events

    def stop(self) -> set[Link]:
        """Stops what runs; the links that it held, perhaps amid a frame."""
        held: set[Link] = set()
        self._close()
        for active in self._active.values():
            held |= active.links
            active.generator.close()  # type: ignore[attr-defined]
        self._active.clear()
        self._queues.clear()
        return held
