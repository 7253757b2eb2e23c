"""Which receive takes which message, as MPI says it and in the simplest way: what both matchers are compared with."""

from __future__ import annotations

from typing import Any

from collectived_proto.types import ANY_SOURCE


class MatchingRules:
    """Those of one receiver: in a list of receives and a list of messages, the first that fit."""

    def __init__(self) -> None:
        self.receives: list[tuple[Any, int, int]] = []
        self.messages: list[tuple[Any, int, int]] = []

    def post(self, receive: int, source: int, tag: int) -> tuple[int, int] | None:
        for number, (message, sender, other) in enumerate(self.messages):
            if tag == other and source in (sender, ANY_SOURCE):
                del self.messages[number]
                return sender, int(message)
        self.receives.append((receive, source, tag))
        return None

    def deliver(self, message: int, sender: int, tag: int) -> int | None:
        for number, (receive, source, other) in enumerate(self.receives):
            if tag == other and source in (sender, ANY_SOURCE):
                del self.receives[number]
                return int(receive)
        self.messages.append((message, sender, tag))
        return None

    def withdraw(self, receive: int) -> bool:
        before = len(self.receives)
        self.receives = [one for one in self.receives if one[0] != receive]
        return len(self.receives) < before
