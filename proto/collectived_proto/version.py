"""Which versions of the protocol the two sides of a connection speak, and which one they speak with each other. Pure.

Every hello carries a range of versions, and every release speaks its own and that of the minor release before it, so
that the parts of a cluster may be upgraded one after another (`proto/released/README.md` lists what was released).
"""

from __future__ import annotations

from dataclasses import dataclass

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.report.phrases import sanitize_text
from collectived_proto.types import RELEASE

MAX_RELEASE_LENGTH = 32  # characters of what others call their release


@dataclass(frozen=True, order=True, slots=True)
class VersionRange:
    """From `lowest` to `highest`. `release` is what the side calls itself; '' where it does not say."""

    lowest: int
    highest: int
    release: str = ""

    @property
    def protocol_text(self) -> str:
        """`1`, or `1 to 3`"""
        return f"{self.lowest} to {self.highest}" if self.highest != self.lowest else str(self.lowest)

    def __str__(self) -> str:
        return f"release {self.release or 'unknown'}, protocol {self.protocol_text}"


FIRST_VERSIONS = VersionRange(1, 1)  # the versions of a side that sends none
OUR_VERSIONS = VersionRange(1, 1, RELEASE)


def sanitize_versions(lowest: int, highest: int, release: str = "") -> VersionRange:
    """The versions that the other side sent; the first version where it sent none."""
    least = max(lowest, FIRST_VERSIONS.lowest)
    return VersionRange(least, max(highest, least), sanitize_text(release[:MAX_RELEASE_LENGTH]).replace("\n", " "))


def negotiate_version(theirs: VersionRange, they: str, we: str, ours: VersionRange = OUR_VERSIONS) -> int:
    """The version that both speak with each other: the highest that both know.

    Args:
        they, we: what the sides are called in the error, such as "the client" and "this worker".

    Raises:
        FailedPreconditionError: there is none; the text names both and says which is to be upgraded.
    """
    if max(theirs.lowest, ours.lowest) <= min(theirs.highest, ours.highest):
        return min(theirs.highest, ours.highest)
    older, needed = (they, ours.lowest) if theirs.highest < ours.lowest else (we, theirs.lowest)
    raise FailedPreconditionError(
        f"{they} ({theirs}) and {we} ({ours}) have no version of the protocol in common: upgrade {older} to a release "
        f"that speaks protocol {needed}"
    )
