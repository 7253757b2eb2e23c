"""The long form (`make fuzz`): python -m tests.fuzz [--inputs N] [--guided N] [--siege N] [--valid N] [--scribbles N]

Every parser gets N inputs by mutation and, where atheris is installed, N that it finds by watching which lines they
reach; then a living worker is besieged, it and its coordinator get valid messages of extreme values, and members of
groups scribble over the memory in which their ranks meet. Exit status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.feeding import fuzz
from tests.fuzz.parsers import PARSERS
from tests.fuzz.scribbles import besiege
from tests.fuzz.siege import Attacker, GoodJob, knock, status_of
from tests.fuzz.valid_messages import Guests, MemoryWatch

import collectived as cd

MOST_GROWTH_BY_VALID = 5 << 20  # bytes that a daemon may keep of a visit of valid messages, when the guests have gone
REHEARSED = 500  # valid messages to each daemon before growth counts: what a method takes at its first call stays
DRAINS = 100  # of each daemon, when all that is judged has been seen: the first may end it
MOST_GROWTH = 32 << 20  # bytes that a worker may grow by in a siege, after its first quarter


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--inputs", type=int, default=100_000, help="by mutation, for each parser")
    parser.add_argument("--guided", type=int, default=20_000, help="by coverage, for each parser; needs atheris")
    parser.add_argument("--siege", type=int, default=20_000, help="for RPCs, and as many for doorbells")
    parser.add_argument("--valid", type=int, default=20_000, help="valid messages of extreme values, to each daemon")
    parser.add_argument("--scribbles", type=int, default=400, help="groups with a member that scribbles")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    defects = _parsers(options.inputs, options.seed) + _guided(options.guided, options.seed)
    defects += _siege(options.siege, options.seed) + _valid(options.valid, options.seed)
    defects += _scribbles(options.scribbles, options.seed)
    for defect in defects:
        print(f"DEFECT {defect}")
    print(f"{len(defects)} defects")
    return 1 if defects else 0


def _parsers(count: int, seed: int) -> list[str]:
    found: list[str] = []
    for parser in PARSERS:
        started = time.monotonic()
        fed = fuzz(parser, count, seed)
        took = time.monotonic() - started
        grown = f"{fed.growth / (1 << 20):.1f} MiB more at most"
        print(
            f"{parser.name}: {fed.inputs} inputs, {fed.taken} read, {fed.refused} refused, {took:.0f} s, {grown}",
            flush=True,
        )
        found += fed.defects
        if fed.growth > MOST_GROWTH:
            found.append(f"{parser.name}: the process grew by {fed.growth >> 20} MiB")
    return found


def _guided(runs: int, seed: int) -> list[str]:
    if importlib.util.find_spec("atheris") is None:
        print("SKIPPED: inputs guided by coverage, for atheris is not installed: pip install atheris", flush=True)
        return []
    found = []
    for index, parser in enumerate(PARSERS):
        with tempfile.TemporaryDirectory() as folder:
            corpus = Path(folder, "corpus")
            corpus.mkdir()
            for number, data in enumerate(parser.seeds):
                (corpus / str(number)).write_bytes(data)
            options = [
                f"-runs={runs}",
                f"-seed={seed % (1 << 31)}",
                "-timeout=10",
                "-rss_limit_mb=2048",
                f"-artifact_prefix={folder}/",
            ]
            command = [sys.executable, "-m", "tests.fuzz.guided", str(index), *options, str(corpus)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
        last = [line for line in ended.stderr.splitlines() if line.startswith(("#", "Done"))][-1:]
        print(f"{parser.name}, guided: {' '.join(last) or 'nothing ran'}", flush=True)
        if ended.returncode:
            found.append(f"{parser.name}, guided: {ended.stderr[-2000:]}")
    return found


def _judge(stage: str, log: str, grown: Mapping[str, int], most: int) -> list[str]:
    """What daemons have come to in a stage, by their log and how many bytes each has grown by."""
    at = log.find("Traceback")
    found = [] if at < 0 else [f"{stage}: a traceback in the log:\n{log[max(0, at - 500) : at + 4000]}"]
    return found + [f"{stage}: the {name} grew by {size >> 20} MiB" for name, size in grown.items() if size > most]


def _siege(count: int, seed: int) -> list[str]:
    with cd.testing.local(workers=2) as job:
        attacker = Attacker(job)
        first, sizes = max(1, count // 4), []
        try:
            with GoodJob(job) as good:
                for part, more in ((first, 0), (count - first, 1)):
                    attacker.call_all(part, seed + more)
                    attacker.ring_all(part, seed + more)
                    knock(job, part // 4, seed + more)
                    status = status_of(job)
                    sizes.append((status.resident_bytes, status.threads))
        except Exception as error:
            return [f"siege: {type(error).__name__}: {error}\n{job.log[-4000:]}"]
        finally:
            attacker.close()
        grown = sizes[1][0] - sizes[0][0]
        print(
            f"siege: {dict(attacker.answers)}; {good.sums} good sums meanwhile; "
            f"the worker grew by {grown / (1 << 20):.1f} MiB and has {sizes[1][1]} threads ({sizes[0][1]} before)",
            flush=True,
        )
        return _judge("siege", job.log, {"worker": grown}, MOST_GROWTH)


def _valid(count: int, seed: int) -> list[str]:
    """The second visit brings the messages of the first, under other names. Both are judged, after honest use.

    Without the rehearsal the first visit would count a worker's full flight recorder, which is some 8 MiB, and the
    room in which all of it is told; and what each daemon takes when a method is called for the first time.
    """
    with cd.testing.local(workers=2) as job:
        guests, memory, sums = Guests(job), MemoryWatch(job), 0
        grown: list[dict[str, int]] = []
        try:
            memory.rehearse()
            guests.call_all(REHEARSED, seed, 2)
            memory.begin()
            for visit in range(2):
                with GoodJob(job) as good:
                    guests.call_all(count // 2, seed, visit)
                sums += good.sums
                grown.append(memory.growth(0))
            guests.drain_all(DRAINS, seed)
        except Exception as error:
            return [f"valid messages: {type(error).__name__}: {error}\n{job.log[-4000:]}"]
        answers = Counter[str]()
        for (_, code), answered in guests.answers.items():
            answers[code] += answered
        first, whole = grown
        second = {name: size - first[name] for name, size in whole.items()}
        told = "; ".join(
            f"the {name} grew by {first[name] / (1 << 20):.1f} MiB in the first visit and by "
            f"{second[name] / (1 << 20):.1f} MiB in the second"
            for name in first
        )
        sent = f"{dict(guests.messages)} by {len({name for name, _ in guests.answers})} methods"
        print(
            f"valid messages: {sent}, {dict(answers)}; {sums} good sums meanwhile; {told}; "
            f"{job.log.count('Traceback')} tracebacks",
            flush=True,
        )
        return _judge("valid messages", job.log, second, MOST_GROWTH_BY_VALID) + _judge(
            "valid messages, first visit", "", first, MOST_GROWTH_BY_VALID
        )


def _scribbles(count: int, seed: int) -> list[str]:
    """The first quarter shows what a worker needs for such groups."""
    first, sizes, seen = max(1, count // 4), [], Counter[str]()
    with cd.testing.local(workers=1) as job:
        try:
            with GoodJob(job, pause=0.001) as good:
                for part, more in ((first, 0), (count - first, 1)):
                    with besiege(job.workers[0], f"scribbled-{more}", part, seed + more) as outcomes:
                        sizes.append(status_of(job).resident_bytes)
                    seen.update(outcomes)
                sizes.append(status_of(job).resident_bytes)
        except Exception as error:
            return [f"scribbles: {type(error).__name__}: {error}\n{job.log[-4000:]}"]
        grown = sizes[2] - sizes[1]
        print(
            f"scribbles: {count} groups, {dict(seen)}; {good.sums} good sums meanwhile; "
            f"the worker grew by {grown / (1 << 20):.1f} MiB",
            flush=True,
        )
        return _judge("scribbles", job.log, {"worker": grown}, MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
