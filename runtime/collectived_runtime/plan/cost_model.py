"""The cost model: what a message, a byte and a fold cost.

A *link class* has a latency and a bandwidth per direction. All participants of a host share one link to other hosts
(full duplex); inside a host each participant has one of its own. Every message costs its sender and its receiver an
*overhead*. Transfer and fold of a round overlap, since the executor works in segments; a round lasts as long as its
slowest part, and rounds follow each other. This is the Hockney model with the overhead of LogP (R. Hockney, Parallel
Computing 1994; D. Culler et al., PPoPP 1993).

Where several hosts are workers of one machine with few processors, they share these: `shared_processors` follows each
worker, and the closed forms share out what all of them have to do in a round. A worker that has no processor for
itself, beside its ranks, sleeps until a message wakes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Latency in seconds, bandwidth in bytes per second and direction."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Model:
    """The costs of actions; the defaults are those of plain TCP in a rack.

    Args:
        across: the link that a host shares to other hosts.
        inside: the link of each participant inside a host.
        overhead: seconds per message, for its sender and for its receiver.
        fold: bytes folded per second.
        stream: bytes per second that one connection reaches.
        crowd: workers per processor, of the machine on which they are most crowded.
        wakeup: seconds of processor time per message between workers without a processor for themselves.
        copied: bytes per second that one processor sends and receives.
    """

    across: LinkClass = LinkClass(30e-6, 1.25e9)
    inside: LinkClass = LinkClass(5e-6, 10e9)
    overhead: float = 5e-6
    fold: float = 5e9
    stream: float = 2.5e9
    crowd: float = 0.0
    wakeup: float = 20e-6
    copied: float = 1e9

    @property
    def is_crowded(self) -> bool:
        """Whether a worker shares its processor, with its rank at least."""
        return self.crowd > 0.5

    def message_seconds(self, messages: int, busy: float) -> float:
        """Seconds of a host for so many messages to other hosts, while the part `busy` of all hosts has some."""
        return messages * max(1.0, self.crowd * busy) * (self.overhead + (self.wakeup if self.is_crowded else 0.0))

    def transfer_seconds(self, sent: float, received: float, busy: float) -> float:
        """How long bytes between hosts take, of the host that has the most of them."""
        work = max(1.0, self.crowd * busy) * (sent + received) / 2 / self.copied if self.is_crowded else 0.0
        return max(sent / self.across.bandwidth, received / self.across.bandwidth, work)


def lower_bound(hosts: Sequence[int], nbytes: int, model: Model) -> float:
    """Seconds that no all-reduce of that size can beat: one latency, and the least volume on the slowest link.

    Args:
        hosts: participants per host.
        nbytes: of one contribution.
        model: the costs.
    """
    if len(hosts) > 1:
        return model.across.latency + bus_factor(len(hosts)) * nbytes / model.across.bandwidth
    if sum(hosts) > 1:
        return model.inside.latency + bus_factor(sum(hosts)) * nbytes / model.inside.bandwidth
    return 0.0


def bus_factor(participants: int) -> float:
    """2(P-1)/P: what each participant must send, in contributions; bus bandwidth is as in nccl-tests."""
    return 2 * (participants - 1) / participants
