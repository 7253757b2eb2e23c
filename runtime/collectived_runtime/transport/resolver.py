"""Names of hosts become addresses on a thread of their own, for the system's resolver may take its time."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Callable

HostPort = tuple[str, int]  # host and port


class Resolver:
    """One thread, made when the first name is asked for; questions are answered one after another."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[HostPort, Callable[[HostPort | str], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def resolve(self, place: HostPort, answer: Callable[[HostPort | str], None]) -> None:
        """Call `answer`, from some thread, with an address that can be dialled, or with why there is none."""
        host, port = place
        if not 0 < port < 1 << 16:
            answer(f"{port} is no port: expected 1 to 65535")
        elif _is_numeric(host):
            answer(place)
        else:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="resolver", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # there are no more to be had, now
                    answer(f"{host} cannot be looked up: {error}")
                    return
                self._thread = thread
            self._requests.put((place, answer))

    def close(self) -> None:
        """End the thread when it has its answer; the system's resolver is not waited for."""
        self._requests.put(None)

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None:
            (host, port), answer = asked
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                answer(getattr(error, "strerror", None) or f"no name of a host: {error}")
            else:
                best = min(found, key=lambda one: one[0] != socket.AF_INET)
                answer((str(best[4][0]), port))


def _is_numeric(host: str) -> bool:
    """Return whether a host is an address, which needs no resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
