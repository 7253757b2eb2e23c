"""Sends and receives of the native core, as threads that are stepped in random order (see model.py).

A sender has a table of letters, which it alone writes; a receiver answers in receipts, which it alone writes; it alone
decides which letter belongs to which receive: the first one that a sender has for it with a tag, for which it looks
twice. A send is done when its letter is posted, or, where it is longer than
the ring of its letter, when all of it is in the ring. Checked: every letter arrives once, whole, in order per sender
and tag; a receive that was cancelled takes no letter; all end, also when somebody dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.native.machine import WORKER, Thread, Violation
from tests.native.memory_models import Memory, StoreBuffers, WeakMemory
from tests.native.model import COMPLETE, PENDING, Engine, World, outcome

SLOTS, RING = 2, 2  # letters on their way at once; pieces of one that lie in memory


@dataclass
class Send:
    to: int
    tag: int
    pieces: int
    number: int
    slot: int | None = None
    serial: int = 0
    filled: int = 0
    state: str | None = PENDING


@dataclass(eq=False)
class Receive:
    source: int | None
    tag: int
    cancels: bool = False
    key: str = ""  # of its state in memory: 'posted', 'matched' or 'cancelled'
    sender: int = -1
    slot: int = -1
    serial: int = 0
    taken: int = 0
    pieces: int = 0
    got: list[Any] = field(default_factory=list)
    state: str | None = PENDING


class LettersWorld(World):
    def __init__(self, seats: int, memory: Any, chance: Random, *, fault: str = "") -> None:
        super().__init__(seats, lambda words, random: memory(words | letter_words(seats), random), chance, fault=fault)
        self.sends: list[list[Send]] = [[] for _ in range(seats)]
        self.receives: list[list[Receive]] = [[] for _ in range(seats)]
        self.free: list[list[int]] = [[*range(SLOTS)] for _ in range(seats)]
        self.posted: list[list[Send | None]] = [[None] * SLOTS for _ in range(seats)]
        self.sequence = [0] * seats  # how many letters each has begun
        self.addressed = [0] * seats
        self.serials = [[0] * SLOTS for _ in range(seats)]

    # ---- The sender's side ----

    def tell_mail(self, seat: int) -> Thread:
        """Something is new for that seat: a letter, more of it, or a receipt."""
        if self.fault == "no mail":
            return
        yield "change", ("mail", seat), lambda value: value + 1
        if (yield "load_sc", ("asleep", seat)):
            yield from self.ring(seat)

    def advance_send(self, me: int, send: Send) -> Thread:
        if send.slot is None:
            if not self.free[me]:
                return False
            send.slot = min(self.free[me])
            self.free[me].remove(send.slot)
            self.posted[me][send.slot] = send
            yield from self.post(me, send)
            return True
        taken = 0
        if (yield "load", ("receipt", send.to, me, send.slot, "serial")) == send.serial:
            taken = yield "load", ("receipt", send.to, me, send.slot, "taken")
        if send.filled == send.pieces or send.filled - taken >= RING:
            return False
        yield from self.fill(me, send)
        yield from self.tell_mail(send.to)
        return True

    def post(self, me: int, send: Send) -> Thread:
        slot = send.slot
        assert slot is not None
        serial = self.serials[me][slot] = self.serials[me][slot] + 1
        letter = ("letter", me, slot)
        yield "store", (*letter, "serial"), 2 * serial
        if self.fault == "letter shown first":
            yield "store", (*letter, "serial"), 2 * serial + 1
        self.sequence[me] += 1
        yield "store", (*letter, "about"), (send.to, send.tag, send.number, send.pieces, self.sequence[me])
        yield "store", (*letter, "filled"), 0
        send.serial = 2 * serial + 1
        yield from self.fill(me, send)
        yield "store", (*letter, "serial"), send.serial
        yield from self.tell_mail(send.to)

    def fill(self, me: int, send: Send) -> Thread:
        piece = send.filled
        send.filled += 1
        data = ("piece", me, send.slot, piece % RING)
        if self.fault == "filled before it is there":
            yield "store", ("letter", me, send.slot, "filled"), piece + 1
        yield "store_relaxed", data, (me, send.to, send.tag, send.number, piece)
        yield "store", ("letter", me, send.slot, "filled"), piece + 1
        if send.filled == send.pieces:
            send.state = COMPLETE

    def reclaim(self, me: int) -> Thread:
        """Slots whose letters have been taken whole."""
        moved = False
        for slot, send in enumerate(self.posted[me]):
            if send is None or send.filled < send.pieces:
                continue
            if self.fault != "slot reused early":
                if (yield "load", ("receipt", send.to, me, slot, "serial")) != send.serial:
                    continue
                if (yield "load", ("receipt", send.to, me, slot, "taken")) < send.pieces:
                    continue
            self.posted[me][slot] = None
            self.free[me].append(slot)
            moved = True
        return moved

    # ---- The receiver's side ----

    def find_first(self, me: int, sender: int, tag: int) -> Thread:
        """The slot, serial and length of the first letter of a sender, of those that are seen; None: there is none."""
        found = None
        for slot in range(SLOTS):
            letter = ("letter", sender, slot)
            serial = yield "load", (*letter, "serial")
            about = yield "load", (*letter, "about")
            if serial % 2 == 0 or (yield "load", (*letter, "serial")) != serial:
                continue
            if about[:2] != (me, tag) or self.has_matched(me, sender, slot, serial):
                continue
            if found is None or about[4] < found[3]:
                found = slot, serial, about[3], about[4]
        return found

    def match(self, me: int, receive: Receive) -> Thread:
        for sender in [receive.source] if receive.source is not None else range(self.seats):
            found = yield from self.find_first(me, sender, receive.tag)
            if found is not None and self.fault != "one look":
                found = yield from self.find_first(me, sender, receive.tag)
            if found is None:
                continue
            if self.fault != "others overlooked" and self.is_for_another(me, sender, receive):
                continue
            slot, serial, pieces, _ = found
            if self.fault == "cancelled without a look":
                yield "store", receive.key, "matched"
            elif not (yield from self.compare_and_swap(receive.key, "posted", "matched")):
                return False
            receive.sender, receive.slot, receive.serial, receive.pieces = sender, slot, serial, pieces
            yield "store", ("receipt", me, sender, slot, "taken"), 0
            yield "store", ("receipt", me, sender, slot, "serial"), serial
            yield from self.tell_mail(sender)
            return True
        return False

    def is_for_another(self, me: int, sender: int, receive: Receive) -> bool:
        """Whether a receive before this one would take it: it came after that one had been looked at."""
        earlier = self.receives[me][: self.receives[me].index(receive)]
        return any(
            one.sender < 0 and not one.state and one.tag == receive.tag and one.source in (None, sender)
            for one in earlier
        )

    def has_matched(self, me: int, sender: int, slot: int, serial: int) -> bool:
        return any((r.sender, r.slot, r.serial) == (sender, slot, serial) for r in self.receives[me])

    def advance_receive(self, me: int, receive: Receive) -> Thread:
        if receive.sender < 0:
            return (yield from self.match(me, receive))
        sender, slot, piece = receive.sender, receive.slot, receive.taken
        if (yield "load", ("letter", sender, slot, "filled")) <= piece:
            return False
        receipt = ("receipt", me, sender, slot, "taken")
        if self.fault == "taken before it is read":
            yield "store", receipt, piece + 1
            yield from self.tell_mail(sender)
        found = yield "load_relaxed", ("piece", sender, slot, piece % RING)
        receive.got.append(found)
        if not found or found[0] != sender or found[1:3] != (me, receive.tag) or found[4] != piece:
            raise Violation(f"seat {me} read {found} as piece {piece} of a letter of seat {sender}, tag {receive.tag}")
        yield "store", receipt, piece + 1
        yield from self.tell_mail(sender)
        receive.taken += 1
        if receive.taken == receive.pieces:
            receive.state = COMPLETE
        return True

    def cancel(self, receive: Receive) -> Thread:
        """By another thread than the one that leads."""
        if self.fault == "cancelled without a look":
            if (yield "load_sc", receive.key) != "posted":
                return
            yield "store", receive.key, "cancelled"
        elif not (yield from self.compare_and_swap(receive.key, "posted", "cancelled")):
            return
        receive.state = "cancelled"

    # ---- The engine ----

    def is_done(self, seat: int) -> bool:
        arrived = sum(receive.state == COMPLETE for receive in self.receives[seat])
        return all(send.state for send in self.sends[seat]) and arrived == self.addressed[seat]

    def work(self, e: Engine) -> Thread:
        """Go on until all that this seat sends is sent, and all that others send it has arrived."""
        me = e.seat
        jobs: list[Send | Receive] = [*self.sends[me], *self.receives[me]]
        while not self.is_done(me):
            heard = yield "load_sc", ("mail", me)
            rung = yield "load_sc", ("bell", me)
            found = outcome((yield "load_sc", "decided"), 0)
            if found != PENDING:
                return found
            moved = yield from self.reclaim(me)
            blocked = False  # letters leave in order
            for job in jobs:
                if job.state or (isinstance(job, Send) and blocked and job.slot is None):
                    continue
                moved |= (
                    yield from self.advance_send(me, job) if isinstance(job, Send) else self.advance_receive(me, job)
                )
                blocked |= isinstance(job, Send) and job.slot is None
            if moved:
                continue
            yield "change", ("asleep", me), lambda value: value + 1
            if (yield "load_sc", ("mail", me)) == heard and not self.is_done(me):
                yield "sleep", ("bell", me), rung
            yield "change", ("asleep", me), lambda value: value - 1
        return COMPLETE

    def cancelling(self, seat: int, receive: Receive) -> Thread:
        yield from self.cancel(receive)
        yield from self.ring(seat)


def letter_words(seats: int) -> dict[Any, Any]:
    words: dict[Any, Any] = {("mail", seat): 0 for seat in range(seats)}
    for sender in range(seats):
        for slot in range(SLOTS):
            words |= {("letter", sender, slot, what): 0 for what in ("serial", "filled")}
            words["letter", sender, slot, "about"] = (None, None, None, 0, 0)
            words |= {("piece", sender, slot, number): None for number in range(RING)}
            words |= {("receipt", seat, sender, slot, what): 0 for seat in range(seats) for what in ("serial", "taken")}
    words |= {("receive", seat, number): "posted" for seat in range(seats) for number in range(16)}
    return words


def run_letters(chance: Random, fault: str = "") -> LettersWorld:
    """One random exchange; sometimes somebody dies, or cancels.

    Raises:
        Violation: a promise was broken.
    """
    seats = chance.choice((2, 2, 3))
    memory: type[Memory] = chance.choice((StoreBuffers, WeakMemory))
    world = LettersWorld(seats, memory, chance, fault=fault)
    counts: dict[tuple[int, int, int], int] = {}
    for _ in range(chance.randrange(1, 6)):
        source, to = chance.sample(range(seats), 2)
        key = (source, to, chance.randrange(2))
        number = counts[key] = counts.get(key, -1) + 1
        world.addressed[to] += 1
        world.sends[source].append(Send(to, key[2], chance.choice((1, 1, 3)), number))
        any_source = chance.random() < 0.3
        world.receives[to].append(Receive(None if any_source else source, key[2]))
        if chance.random() < 0.3:  # cancelled, perhaps, and then asked for again
            world.receives[to].append(Receive(None if any_source else source, key[2], cancels=True))
    for seat in range(seats):
        chance.shuffle(world.receives[seat])
        # From any source and from one with the same tag: who comes first would starve the other.
        if any(receive.source is None for receive in world.receives[seat]):
            for receive in world.receives[seat]:
                receive.source = None
        for number, receive in enumerate(world.receives[seat]):
            receive.key = ("receive", seat, number)  # type: ignore[assignment]
        world.threads[seat, "main"] = world.work(world.engines[seat])
        for number, receive in enumerate(world.receives[seat]):
            if receive.cancels:
                world.threads[seat, "cancel", number] = world.cancelling(seat, receive)
    world.run(strike(world, chance))
    judge(world)
    return world


def strike(world: LettersWorld, chance: Random) -> Any:
    for _ in range(chance.randrange(1, 400)):
        yield
    if chance.random() < 0.3:
        victim = chance.randrange(world.seats)
        if (victim, "main") in world.threads:
            world.kill(victim)
            world.threads[WORKER] = world.lost(victim, "LOST")


def judge(world: LettersWorld) -> None:
    for seat in range(world.seats):
        arrived = [receive.got[0] for receive in world.receives[seat] if receive.state == COMPLETE]
        if len(set(arrived)) < len(arrived):
            raise Violation(f"seat {seat} got a letter twice: {arrived}")
        cancelled = [
            receive for receive in world.receives[seat] if receive.state == "cancelled" and receive.sender >= 0
        ]
        if cancelled:
            raise Violation(f"seat {seat} was told that a receive is cancelled, which took a letter: {cancelled}")
        latest: dict[tuple[int, int], int] = {}
        for receive in world.receives[seat]:  # as they were posted
            if receive.got and receive.got[0][3] < latest.get((receive.sender, receive.tag), 0):
                raise Violation(f"seat {seat} gave a letter to a receive that was posted later: {world.receives[seat]}")
            if receive.got:
                latest[receive.sender, receive.tag] = receive.got[0][3]
        order: dict[tuple[int, int], int] = {}
        matched = sorted((r.got[0][3], r.sender, r.tag) for r in world.receives[seat] if r.got)
        for number, sender, tag in matched:
            if number != order.get((sender, tag), 0):
                raise Violation(f"seat {seat} missed a letter of seat {sender}, tag {tag}: {matched}")
            order[sender, tag] = number + 1


def search_letters(fault: str, runs: int, seed: int) -> str:
    """Return what the first of so many runs finds, or ''."""
    for number in range(runs):
        try:
            run_letters(Random(f"{seed}.{number}"), fault)
        except Violation as violation:
            return f"{fault or 'letters'}, run {number}: {violation}"
    return ""
