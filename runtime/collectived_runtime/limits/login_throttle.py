"""Wrong credentials: an address from which too many come. Pure but for the clock it is given.

A caller with a right credential is served, even if wrong ones came from its address: a neighbour of the same host,
router or network must not shut it out. So a credential is checked first, and this throttle applies to a wrong one
alone, which is then refused late and with fewer words.

Addresses are counted apart, those of one network of IPv6 (64 bits, which one host may have) together. The loopback is
many people at one address, and is not counted.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

WINDOW_SECONDS = 60.0
MAX_ADDRESSES = 4096  # that are remembered; the one that has been quiet for longest is forgotten


class LoginThrottle:
    """Failures by address; may be asked by several threads.

    Args:
        most: failures of one address within `WINDOW_SECONDS`, after which it has failed too often until they are older;
            0: there is no such limit.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = most
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how often

    def __len__(self) -> int:
        return len(self._failures)

    def record_failure(self, address: str) -> None:
        """Count a wrong credential from that address."""
        place = _address_key(address)
        if not place:
            return
        now = self._clock()
        with self._lock:
            since, count = self._failures.pop(place, (now, 0))
            self._failures[place] = (now, 1) if now - since >= WINDOW_SECONDS else (since, count + 1)
            if len(self._failures) > MAX_ADDRESSES:
                self._failures.popitem(last=False)

    def has_failed_too_often(self, address: str) -> bool:
        """Whether a refusal of a wrong credential from that address is to be delayed."""
        if not self._max_failures:
            return False
        since, count = self._failures.get(_address_key(address), (0.0, 0))
        return count >= self._max_failures and self._clock() - since < WINDOW_SECONDS


def _address_key(address: str) -> str:
    """The key of an address: itself, or its network; '' for the loopback, and for a text that is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return "" if found.is_loopback else str(ipaddress.ip_network((found, 64), strict=False))
        found = found.ipv4_mapped
    return "" if found.is_loopback else str(found)


def parse_peer_address(peer: str) -> str:
    """The address in what gRPC says of a caller: `ipv4:10.0.0.7:5341`, `ipv6:[::1]:5341`, `ipv6:%5B::1%5D:5341`."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
