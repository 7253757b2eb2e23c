"""Signatures of the compiled core. README.md of this folder's parent says what the calls mean."""

from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, final

source_digest: str

# What `Job.wait` returns. Positive numbers are reasons: the generation is over.
COMPLETE: int
PENDING: int
KNOCK: int
DESCRIBE: int

# Reasons.
LOST: int  # a member's process is gone
LEFT: int  # a member has left in order
DEADLINE: int  # not all came in time
ABORTED: int  # somebody called abort
INTERRUPTED: int  # Ctrl-C in a wait
MISMATCH: int  # contracts differ; the culprit is who noticed
NONSENSE: int  # a member wrote what it never may
WORKER: int  # the worker is gone
STOPPED: int  # the worker knows why (groups of several hosts)
FAILED: int  # a rank cannot go on: memory, descriptors
CANCELLED: int  # of one job alone: a receive that was cancelled
EXPIRED: int  # of one job alone: a receive or send that was not matched in time
DETACHED: int  # of one job alone: the engine was detached first
NO_ROOM: int  # of one job alone: no memory is left for letters
BY_DOORBELL: int  # of one job alone: its worker has carried it out, and says by the doorbell what has come

# Operations of a plan.
ALL_REDUCE: int
REDUCE: int
BROADCAST: int
ALL_GATHER: int
GATHER: int
SCATTER: int
REDUCE_SCATTER: int
ALL_TO_ALL: int
BARRIER: int
ACROSS: int  # by the worker, whose seat is the last, to other hosts and back
SENDS: int  # not in plans: as what totals count letters
RECEIVES: int

# What the first tick of a plan is for.
MEETS_NOT: int  # for the value: all is known from the contract
MEETS_EQUAL: int  # for blobs, too: the plan holds if all of them are equal to the own one, else DESCRIBE
MEETS_KNOWN: int  # for blobs of use to others: the plan holds anyway
MEETS_ANY: int  # for blobs of others, without which nothing is known: always DESCRIBE

MAX_BLOB: int  # bytes
MAX_LETTER_BLOB: int  # bytes
MAX_LETTERS: int  # of one sender, that nobody has read
MAX_AXES: int  # of arrays in calls that are remembered
# Modes of `send` and `receive`.
BLOCKING: int  # None, or a job to be waited for
QUIET: int  # a job
NOTIFYING: int  # a job that `collect` returns when it is done
# What a call that is repeated is.
COLLECTIVE: int
SEND: int
RECEIVE: int
# Moves of a route.
MOVE_SEND: int
MOVE_RECEIVE: int
MOVE_KEEP: int  # receive, for a fold that waits for others
MOVE_FOLD: int
MOVE_FINISH: int
MOVE_COPY: int
LATE: int  # what is odd of a run where nothing but time has passed
MOST_ROUTES: int
MOST_WIRES: int
# Orders to a carrier, and its answers.
ORDER_RUN: int
ORDER_STAGE: int
ORDER_PING: int
ORDER_LINK: int
ANSWER_DONE: int
ANSWER_STAGED: int
ANSWER_PONG: int
ANSWER_BROKEN: int
ANSWER_REFUSED: int
MOST_LINKS: int  # peers of a carrier

MAX_SEATS: int
SCHEDULE_VERSION: int
WORKER_SEAT: int  # in place of a seat: the worker

Buffers = tuple[Any, ...]
# (dtype, counts, leaves in, leaves out): see `Engine.plan`.
Phase = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

def segment_bytes(geometry: bytes, /) -> int: ...
def create_segment(geometry: bytes, /) -> int: ...
def attach(
    descriptor: int,
    geometry: bytes,
    seat: int,
    spin_ns: int,
    yields: int,
    hops: bool,
    knock: int,
    doorbell: int,
    clock_offset_ns: int,
    is_operated: bool,
    shows_memory: bool,
    /,
) -> Engine: ...
def watch(descriptor: int, geometry: bytes, /) -> Watcher: ...

@final
class Plan: ...

@final
class Job:
    def wait(self, timeout_ns: int, /) -> int: ...
    def state(self, /) -> int: ...
    def instance(self, /) -> int: ...
    def waiting(self, /) -> int: ...
    def source(self, /) -> int: ...
    def phases_done(self, /) -> int: ...
    def blobs(self, /) -> tuple[bytes, ...]: ...
    def describe(self, plan: Plan | None, inputs: Buffers, outputs: Buffers, /) -> None: ...
    def cancel(self, /) -> None: ...
    def abandon(self, /) -> None: ...

@final
class Engine:
    def plan(
        self,
        operation: int,
        reduce_op: int,
        root: int,
        phases: tuple[Phase, ...],
        digest: bytes,
        terms: int,
        is_open: bool,
        meets: int,
        description: int,
        /,
    ) -> Plan: ...
    def run(
        self, plan: Plan, inputs: Buffers, outputs: Buffers, timeout_ns: int, blob: bytes | None, asked_ns: int = ..., /
    ) -> Job | None: ...
    def submit(
        self,
        plan: Plan,
        inputs: Buffers,
        outputs: Buffers,
        timeout_ns: int,
        blob: bytes | None,
        notify: bool,
        asked_ns: int = ...,
        /,
    ) -> Job: ...
    def enqueue(self, plan: Plan, inputs: Buffers, outputs: Buffers, timeout_ns: int, blob: bytes | None, /) -> Job: ...
    def send(
        self, to: int, tag: int, inputs: Buffers, timeout_ns: int, blob: bytes | None, mode: int, /
    ) -> Job | None: ...
    def receive(
        self, source: int, tag: int, outputs: Buffers | None, timeout_ns: int, blob: bytes | None, mode: int, /
    ) -> Job | None: ...
    def collect(self, timeout_ns: int, /) -> list[Job]: ...
    def advance(self, budget: int, /) -> bool: ...
    def verdict(self, /) -> tuple[int, int, int, tuple[int, ...]]: ...
    def waiting(self, /) -> int: ...
    def gather(self, plan: Plan, instance: int, outputs: Buffers, /) -> int: ...
    def bring(self, plan: Plan, instance: int, inputs: Buffers, blob: bytes, /) -> int: ...
    def attend(self, instance: int, each: bool, /) -> bool: ...
    def skip(self, /) -> int: ...
    def count_message(self, operation: int, nbytes: int, nanoseconds: int, /) -> None: ...
    def next_instance(self, /) -> int: ...
    def abort(self, reason: int, culprit: int, /) -> int: ...
    def rouse(self, /) -> None: ...
    def leave(self, /) -> None: ...
    def limit(self, instance: int, /) -> None: ...
    def detach(self, /) -> None: ...

# (kind, round, wire, memory, mine, left, at, elements, header, parts): see `struct move`.
RouteMove = tuple[int, int, int, int, int, int, int, int, bytes, tuple[int, ...]]
# Of a wire: (bytes sent of the open instance, what was received and not taken, bytes sent and received of the others).
WireState = tuple[int, bytes, int, int]
# (route, calls, nanoseconds, from the first to the last arrival, from each seat's arrival to the end)
RouteTotal = tuple[int, int, int, int, tuple[int, ...]]
# (instance, route, started, ended, when each rank came, its description, when the round of each of the first transfers
# began and when that was done)
RecentCrossing = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

def crossings(engine: Engine, knock: int, patience_ns: int, header: bytes, /) -> Crossings: ...
def next_chain(chain: bytes, contract: bytes, /) -> bytes: ...

@final
class Crossings:
    def add(
        self,
        gathers: Plan,
        brings: Plan,
        contract: bytes,
        terms: tuple[int, int, int, int, int, int, int],
        moves: tuple[RouteMove, ...],
        constants: bytes,
        blob: bytes,
        said: bytes,
        /,
    ) -> int: ...
    # Returns (events of others, next instance, chain, is odd, is open, wires, totals, recent).
    def run(
        self,
        instance: int,
        chain: bytes,
        wires: tuple[tuple[int, bytes], ...],
        polls: bytearray,
        timeout_ns: int,
        /,
    ) -> tuple[
        list[tuple[int, int]],
        int,
        bytes,
        bool,
        bool,
        tuple[WireState, ...],
        list[RouteTotal],
        list[RecentCrossing],
    ]: ...

def carrier(orders: int, /) -> Carrier: ...

@final
class Carrier:
    def offer(self, instance: int, value: Any, result: Any, staging: Any, /) -> None: ...
    def withdraw(self, instance: int, /) -> bool: ...
    def close(self, /) -> None: ...
    def progress(self, /) -> tuple[int, int]: ...

# What a call is: (Python's word for it, see, restore, engine, generation, kind, peer, tag, plan, is_open, blob,
# timeout_ns).
# `see` gives value and `out` as arrays of NumPy's, `restore` what the caller gets; None for arrays of NumPy's.
RepeatTerms = tuple[
    object,
    Callable[[Any, Any], Any] | None,
    Callable[[Any], Any] | None,
    Engine,
    int,
    int,
    int,
    int,
    Plan | None,
    bool,
    bytes | None,
    int,
]
# What it brings: (Python's word for it, plan, blob by which it is known, dtype, shape, bytes).
Form = tuple[object, Plan | None, bytes | None, Any, tuple[int, ...], int]
# Of an array of a list: its place there, dtype, shape and bytes.
Part = tuple[int, Any, tuple[int, ...], int]

def repeats(
    array_type: type,
    make_array: Callable[[tuple[int, ...], Any], Any],
    make_large_array: Callable[[tuple[int, ...], Any], Any],
    large_bytes: int,
    any_value: object,
    absent: object,
    standing: object,
    numbers: Iterator[int],
    /,
) -> Repeats: ...
def knows_layout(array_type: type, /) -> bool: ...

@final
class Repeats:
    def run(self, operation: object, value: Any, out: Any, frame: FrameType | None, /) -> Any: ...
    def add(
        self,
        operation: object,
        value: Any,
        frame: FrameType,
        own_codes: tuple[CodeType, ...],
        terms: RepeatTerms,
        form: Form,
        parts: tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]] | None,
        /,
    ) -> None: ...
    def clear(self, /) -> None: ...

@final
class Watcher:
    def decided(self, /) -> tuple[int, int, int]: ...
    def verdict(self, /) -> tuple[int, int, int, tuple[int, ...]]: ...
    def seat(self, seat: int, /) -> tuple[int, ...]: ...
    def totals(self, seat: int, /) -> tuple[tuple[int, int, int, int, int], ...]: ...
    def history(self, seat: int, first: int, last: int, /) -> tuple[tuple[int, int, int, int], ...]: ...
    def lost(self, seat: int, /) -> int: ...
    def left(self, seat: int, /) -> int: ...
    def abort(self, reason: int, culprit: int, /) -> int: ...
    def limit(self, instance: int, reason: int, culprit: int, /) -> None: ...
    def review(self, /) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int]: ...
    def complete(self, instance: int, /) -> bool: ...
    def expire(self, instance: int, /) -> bool: ...
    def set_waiting(self, waiting: int, /) -> None: ...
    def close(self, /) -> None: ...

# Folds (arithmetic.h). Types and operations are numbered as on the wire (DataType and ReduceOp of common.proto):
# (dtype, op, out, spans, is_final, divisor, stream).
def fold_inputs(
    dtype: int, op: int, out: Any, spans: Sequence[Any], is_final: bool, divisor: int, stream: bool, /
) -> None: ...
def fold_partials(
    dtype: int, op: int, out: Any, spans: Sequence[Any], is_final: bool, divisor: int, stream: bool, /
) -> None: ...

# Copy bytes (copying.h), the latter past the caches; the two do not overlap.
def copy(out: Any, source: Any, /) -> None: ...
def copy_streamed(out: Any, source: Any, /) -> None: ...
def arithmetic_sizes(dtype: int, op: int, /) -> tuple[int, int, int]: ...
def arithmetic_variant() -> str: ...
def choose_arithmetic(name: str, /) -> bool: ...

# Compressed values (compression.h). Formats are numbered as on the wire (CommunicationOptions.Compression of
# common.proto); buffers hold whole blocks, as many each.
BLOCK_VALUES: int  # values of a block

def block_bytes(format: int, /) -> int: ...  # of a compressed block; 0: no such format
def compress(format: int, out: Any, values: Any, /) -> None: ...
def expand(format: int, out: Any, compressed: Any, /) -> None: ...
def add_expanded(format: int, out: Any, mine: Any, compressed: Any, /) -> None: ...  # `out` may be `mine`
