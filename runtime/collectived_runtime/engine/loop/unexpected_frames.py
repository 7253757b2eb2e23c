"""Frames that are not the expected one: they may be early, of peers with another collective, or nonsense."""

from __future__ import annotations

from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.failure.reporter import FaultReporter
from collectived_runtime.engine.submit.tracker import InstanceTracker
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkProtocolError


class UnexpectedFrames:
    """Judges the frames of one generation, and reports what has to be decided."""

    def __init__(
        self, topology: GroupTopology, generation: int, tracker: InstanceTracker, reporter: FaultReporter
    ) -> None:
        self._identity = topology.group.key, generation
        self._tracker = tracker
        self._reporter = reporter
        self._said_goodbye: set[Link] = set()  # amid what they were needed for

    def judge_unexpected(self, link: Link, expected: bytes, got: bytes) -> bool:
        """A frame that is not the one expected: wait for better news, or raise LinkBroken for nonsense."""
        try:
            frame = frames.parse(got)
        except frames.BadFrame as error:
            raise LinkProtocolError(str(error), link.peer) from None
        running = self._tracker.next_number
        if frame.kind is not frames.FrameKind.BYE:
            self._check_for_mismatch(link, frame, running)
        elif link not in self._said_goodbye:  # the coordinator knows what that means; without it we do
            self._said_goodbye.add(link)
            self._reporter.report_worker_left(link.peer, running)
        return True

    def judge_early(self, link: Link, frame: frames.Frame) -> None:
        """A frame on an idle link: of an instance to come it waits, of one that is over it differs from what we did."""
        self._check_for_mismatch(link, frame, self._tracker.next_number - 1)

    def _check_for_mismatch(self, link: Link, frame: frames.Frame, latest: int) -> None:
        """`latest` is the last instance of which no frame is to come here; a frame of it, or before, is a mismatch."""
        if (frame.key, frame.generation) != self._identity:
            raise LinkProtocolError("a frame of another generation of the group", link.peer)
        if frame.instance > latest:
            return
        instance = self._tracker.find(frame.instance)
        if instance is not None and not instance.is_barred:
            self._reporter.report_mismatch(instance, link.peer)
