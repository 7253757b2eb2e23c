"""Names of groups as values of a label: at most so many, however many groups come and go."""

from __future__ import annotations

from collections import OrderedDict

MAX_GROUP_LABELS = 100  # names of groups that are told apart
OTHER = "other"


class GroupLabelAllocator:
    """Gives each group that begins the label under which it is counted until it ends.

    A name keeps its label while groups of that name run, and beyond that until another one needs the place; those that
    find no place are counted together as `other`.
    """

    def __init__(self, most: int = MAX_GROUP_LABELS) -> None:
        self._max_labels = most
        self._running_groups: OrderedDict[str, int] = OrderedDict()  # by name; those that ended longest ago first

    def acquire(self, name: str) -> tuple[str, str | None]:
        """The label of a group that begins, and the one that is given up for it."""
        given_up = None
        if name not in self._running_groups and len(self._running_groups) >= self._max_labels:
            given_up = next((known for known, running in self._running_groups.items() if not running), None)
            if given_up is None:
                return OTHER, None
            del self._running_groups[given_up]
        self._running_groups[name] = self._running_groups.get(name, 0) + 1
        return name, given_up

    def release(self, label: str) -> None:
        """Give a label back: a group with it has ended."""
        if label in self._running_groups:
            self._running_groups[label] -= 1
            self._running_groups.move_to_end(label)


def assign_labels(names: list[str], most: int = MAX_GROUP_LABELS) -> dict[str, str]:
    """Labels of these names, for numbers that need no memory: the first of them keep theirs."""
    kept = list(dict.fromkeys(names))[:most]
    return {name: name for name in kept} | {name: OTHER for name in names if name not in set(kept)}
