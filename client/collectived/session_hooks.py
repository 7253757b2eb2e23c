"""The interface of a session for its groups, and the data that a group gets for a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from collectived.calls.channel import RankChannel
from collectived.calls.prepare import PreparedCallCache
from collectived.connection.join_request import JoinRequest
from collectived_proto.types import GroupInfo

if TYPE_CHECKING:
    from collectived.group import Group


class JoinedRank(NamedTuple):
    """A rank's place in one generation of a group, and its way to the worker."""

    info: GroupInfo
    rank: int
    channel: RankChannel
    prepared_calls: PreparedCallCache


class SessionHooks(Protocol):
    """The methods of a session that its groups call."""

    def _unregister_group(self, group: Group) -> None:
        """This rank takes part no longer."""

    def _register_group(self, group: Group) -> None:
        """It takes part again, or a group that was split off does."""

    def _join_group(self, wish: JoinRequest, enter: Callable[[JoinedRank], Group]) -> Group:
        """Waits for the others, and takes a place among them."""
