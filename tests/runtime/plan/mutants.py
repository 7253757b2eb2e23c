"""Planted faults: each is put into a copy of the plan package, and the tests must notice.

`python tests/runtime/plan/mutants.py` says for each fault whether it was caught; the exit status is the number of
those that were not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = HERE.parents[2] / "runtime"

MUTANTS = (
    ("ring.py", "shares[position - step - 1], Buffer.SCRATCH", "shares[position - step], Buffer.SCRATCH"),
    ("ring.py", "for step in range(1, size):", "for step in range(1, size - 1):"),
    ("ring.py", "shares[position - step - 1], Buffer.OUTPUT", "shares[position], Buffer.OUTPUT"),
    ("ring.py", "_RECEIVED_LEFT if lowest < me else _RECEIVED_RIGHT", "_RECEIVED_LEFT"),
    ("ring.py", "        source = Buffer.SCRATCH\n\n", "\n"),
    ("tree.py", "place - reach) % size], span, holder", "place - reach) % size], span, Buffer.INPUT"),
    ("tree.py", "received_left=received_lowest < lowest", "received_left=False"),
    ("tree.py", "place + reach >= size", "place + reach > size"),
    ("tree.py", "min(place + 2 * reach, size)", "place + reach + 1"),
    ("tree.py", "members.index(root)", "0"),
    ("halving_doubling.py", "(second, first) if position & reach", "(first, second) if position & reach"),
    ("halving_doubling.py", "reversed(back)", "back"),
    ("halving_doubling.py", "idle(2 * levels)", "idle(2 * levels + 1)"),
    ("halving_doubling.py", "span, holder, reach = kept", "span, holder, reach = given"),
    ("halving_doubling.py", "if len(core.team(position)) > 1 else Buffer.INPUT", "if False else Buffer.INPUT"),
    ("halving_doubling.py", "begin(block + reach)])", "begin(block + 1)])"),
    ("shuffle.py", "received_left=before < lowest", "received_left=True"),
    ("shuffle.py", "share[after], Buffer.INPUT", "share[servers[0]], Buffer.INPUT"),
    ("shuffle.py", "if me in share and before in contributes", "if me in share"),
    ("shuffle.py", "for other in others if other in receivers", "for other in others[1:] if other in receivers"),
    ("double_tree.py", "zip(span.split(2), (0, 1), strict=True)", "zip((span, span), (0, 1), strict=True)"),
    ("double_tree.py", "2 * (reach - local rank.depth - 1) + side, Recv", "2 * (reach - local rank.depth - 1), Recv"),
    ("double_tree.py", "(0, 1), strict=True", "(0, 0), strict=True"),
    ("double_tree.py", "min(order[slice(*span)])", "order[_root(*span)]"),
    ("one_shot.py", "tuple(sorted(members))", "(me, *others)"),
    ("exchange.py", "table[position][to]", "table[to][position]"),
    ("exchange.py", "return ((Finish(own, Buffer.INPUT), *receives),)", "return (tuple(receives),)"),
    ("exchange.py", "range((size - 1).bit_length())", "range(size.bit_length() - 1)"),
    ("hierarchical.py", "tree.depth(max(map(len, hosts)))", "tree.depth(len(host))"),
    ("hierarchical.py", "heads = [host[group loop] for host in hosts]", "heads = [host[0] for host in hosts]"),
    ("hierarchical.py", "lowest = tuple(min(host) for host in hosts)", "lowest = tuple(stage.heads)"),
    ("hierarchical.py", "instead = {Buffer.INPUT: holder,", "instead = {Buffer.INPUT: Buffer.INPUT,"),
    ("hierarchical.py", "case Inside.LANES if even:", "case Inside.LANES:"),
    ("hierarchical.py", "return _Stage(up, heads, shares[group loop]", "return _Stage(up, heads, span"),
    ("spans.py", "if not len(move.span) and contact in met", "if not len(move.span)"),
    ("spans.py", "if not len(move.span) and contact in met", "if contact in met"),
    ("moves.py", "stop = start + small + (part < longer)", "stop = start + small"),
    ("packs.py", "0 < bytes_per_pack < into.count", "0 < bytes_per_pack <= into.count"),
    ("packs.py", "reversed(tuple(enumerate(leaves)))", "tuple(enumerate(leaves))"),
    ("packs.py", "-(-nbytes // ALIGNMENT)", "(nbytes // ALIGNMENT)"),
    ("batches.py", "len(run) < max_group", "len(run) <= max_group"),
    ("batches.py", "leaf.nbytes <= max_bytes", "leaf.count <= max_bytes"),
    ("walker.py", "if not sent:\n            return None", "if not sent:\n            return Buffer.INPUT, []"),
    ("book.py", "mask != whole", "mask & ~whole"),
    ("book.py", "elif tree != known[3]", "elif False"),
    ("holdings.py", "if a[2] & -a[2] > b[2] & -b[2]", "if False"),
    ("holdings.py", "if self._spent.overlaps(span.start, span.stop)", "if False"),
    ("holdings.py", "or self._finished.overlaps(span.start, span.stop)", ""),
    ("walker.py", "if sent.stop <= received.start or received.stop <= sent.start", "if True"),
    ("intervals.py", "stops[first] = max(stop, stops[last - 1])", "stops[first] = stop"),
    ("choose.py", "nbytes <= row.limit", "nbytes < row.limit"),
    ("simulate.py", "home[peer] == home[me]", "True"),
    ("times.py", "others * nbytes, 2 * others, others * nbytes", "nbytes, 2 * others, nbytes"),
)  # fmt: skip


def passes(name: str, old: str, new: str) -> bool:
    """Whether the tests pass with `old` replaced by `new` in the plan module `name`."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(RUNTIME / "collectived_runtime", Path(copy, "collectived_runtime"))
        module = Path(copy, "collectived_runtime", "plan", name)
        text = module.read_text()
        if text.count(old) < 1:
            raise SystemExit(f"{name} does not contain {old!r}: bring the list up to date")
        module.write_text(text.replace(old, new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(HERE)]
        environment = {**os.environ, "PYTHONPATH": copy, "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
        return run.returncode == 0


def main() -> int:
    if not passes("moves.py", "Span", "Span"):
        raise SystemExit("the tests fail without any fault")
    escaped = 0
    for name, old, new in MUTANTS:
        missed = passes(name, old, new)
        escaped += missed
        print(f"{'ESCAPED' if missed else 'caught '}  {name}: {old!r} -> {new!r}", flush=True)
    print(f"{len(MUTANTS) - escaped} of {len(MUTANTS)} caught")
    return escaped


if __name__ == "__main__":
    sys.exit(main())
