"""Where a rank stands in its group: the generation, the number of the next instance, and the verdict if there is one.

The successor generation begins when its predecessor's verdict is handed to the caller, not when it arrives: that is a
point of the caller's program, so all ranks number alike from there.
"""

from __future__ import annotations

from collectived.call import Call
from collectived_proto.errors import Code
from collectived_proto.types import GroupInfo, Verdict


class Standing:
    """Its owner has a lock."""

    def __init__(self, group: GroupInfo, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.generation = group.generation
        self.next_instance = 0
        self.verdict: Verdict | None = None  # of this generation
        self._verdicts: dict[int, Verdict] = {}
        self._seen = 0  # the latest generation whose verdict the caller has been given

    @property
    def unseen(self) -> Verdict | None:
        """This generation's verdict if the caller has not been given it."""
        return self.verdict if self.verdict is not None and self.verdict.generation != self._seen else None

    def decided(self, verdict: Verdict) -> None:
        """A verdict about this generation, or about one that others have begun before us."""
        self._verdicts[verdict.generation] = verdict
        if verdict.generation == self.generation:
            self.verdict = verdict

    def given(self, verdict: Verdict) -> None:
        """The caller is being given this verdict; with it the successor begins, if there is one."""
        self._seen = verdict.generation
        if verdict.successor and verdict.generation == self.generation:
            self.generation = verdict.successor
            self.next_instance = 0
            self.verdict = self._verdicts.get(verdict.successor)

    def overdue(self, call: Call, worker: str, grace: float) -> Verdict:
        """Nothing has been heard of `call` for `grace` seconds after its deadline."""
        message = (
            f"{worker} has not answered {call.prepared.op} (instance {call.instance} of group {self.group.name!r}, "
            f"{call.prepared.site}) within {grace:g} s after its deadline; it may be stopped or overloaded"
        )
        return self.own_verdict(Code.DEADLINE_EXCEEDED, message, call)

    def own_verdict(self, code: Code, message: str, call: Call | None = None) -> Verdict:
        """What this rank decides alone, because its worker cannot tell it: about `call`, or from the next one on."""
        instance = call.instance if call else -1
        return Verdict(
            self.group.name,
            self.group.key,
            call.generation if call else self.generation,
            code,
            message,
            from_instance=call.instance if call else self.next_instance,
            instance=instance,
            op=call.prepared.op if call else "",
            decided_by=f"rank {self.rank}",
            members=self.group.members,
        )
