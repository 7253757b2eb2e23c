"""Interfaces, ports, and what a measuring session with another host has found."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from collectived_launcher.doctor.facts import InterfaceFacts, NetworkFacts, PathMeasurement, Port, Software
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_launcher.doctor.versions import parse_version, release_distance
from collectived_proto.report.quantities import format_link_rate

SLOW_LINK = 100e6  # bytes per second: a gigabit carries 118e6
SLOW_ROUND_TRIP = 0.005  # seconds
MAX_SKEW_SECONDS = 0.1  # seconds: what logs and traces of several hosts can be told apart by
_SHARE_OF_SPEED = 0.5  # of what an interface says of itself


def check_interfaces(network: NetworkFacts) -> Iterator[Finding]:
    listed = ", ".join(map(interface_text, network.interfaces))
    outer = [one for one in network.interfaces if not ipaddress.ip_address(one.address).is_loopback]
    if not network.interfaces:
        remedy = "ip link set lo up: workers of one host talk to each other over it"
        yield failure("interfaces", "no interface is up, not even the loopback", remedy)
    elif not outer:
        yield ok("interfaces", f"{listed}: enough for a job on this host, none to reach others by")
    else:
        used = next((one for one in outer if one.address == network.outward), None)
        way = f"other hosts are reached by {used.name}" if used else "there is no way to hosts of other networks"
        yield ok("interfaces", f"{listed}; {way}, a job on one host uses the loopback")


def interface_text(interface: InterfaceFacts) -> str:
    """`eth0 10.0.0.2 (10 Gbit/s)`"""
    if interface.speed is None:
        return f"{interface.name} {interface.address}"
    speed = f"{interface.speed / 1000:g} Gbit/s" if interface.speed >= 1000 else f"{interface.speed} Mbit/s"
    return f"{interface.name} {interface.address} ({speed})"


def check_ports(ports: tuple[Port, ...]) -> Iterator[Finding]:
    free = [str(port.number) for port in ports if port.holder is None]
    if free:
        yield ok("ports", f"{', '.join(free)} {'is' if len(free) == 1 else 'are'} free")
    for port in ports:
        if port.ours:
            yield ok("ports", f"{port.number} ({port.used_for}) is held by {port.holder}")
        elif port.holder is not None:
            yield warning(
                "ports",
                f"{port.number} ({port.used_for}) is held by {port.holder or 'a process of somebody else'}",
                "end it, or give the daemon another port; `collectived launch` takes ports that are free by itself",
            )


def check_measurement(found: PathMeasurement, software: Software) -> Iterator[Finding]:
    """The findings of one measuring session, in order of the checks."""
    yield from _check_reach(found)
    if found.peer is not None:
        yield from _check_bandwidth(found)
        yield from check_clock_skew(f"{found.peer.hostname}'s", found.ahead, found.round_trip)
        yield from _check_versions(found, software)


def _check_reach(found: PathMeasurement) -> Iterator[Finding]:
    if found.refused:
        text = f"{found.address} cannot be measured: {found.trouble}"
        yield failure("reach", text, "start `collectived doctor --serve` there anew, and give the token that it prints")
        return
    if found.trouble:
        yield failure(
            "reach",
            f"{found.address} cannot be measured: {found.trouble}",
            "look whether `collectived doctor --serve` runs there at an address of a network that both hosts are in, "
            "and whether a firewall lets TCP through",
        )
        return
    by = f", by {interface_text(found.interface)}" if found.interface else ""
    text = f"{found.address} answers within {found.round_trip * 1e3:.2f} ms{by}"
    if found.round_trip > SLOW_ROUND_TRIP:
        remedy = "use hosts of one network: a collective takes several such rounds"
        yield warning("reach", text, remedy)
    else:
        yield ok("reach", text)


def _check_bandwidth(found: PathMeasurement) -> Iterator[Finding]:
    rates = found.sent_per_second, found.received_per_second
    text = f"{format_link_rate(rates[0])} there, {format_link_rate(rates[1])} back, one TCP connection each"
    way = found.interface
    if way and way.speed and min(rates) < way.speed * 1e6 / 8 * _SHARE_OF_SPEED:
        yield warning(
            "bandwidth",
            f"{text}: less than half of the {way.speed / 1000:g} Gbit/s of {way.name}",
            "look for other traffic, a slower switch or cable between them (ethtool), and small frames (ip link: mtu)",
        )
    elif min(rates) < SLOW_LINK:
        remedy = "choose a faster network; a gigabit carries 118 MB/s"
        yield warning("bandwidth", text, remedy)
    else:
        yield ok("bandwidth", text)


def check_clock_skew(whose: str, ahead: float, round_trip: float) -> Iterator[Finding]:
    """`ahead`: seconds of the other clock before this host's, known to half of `round_trip`."""
    how = "ahead of" if ahead > 0 else "behind"
    text = f"{whose} clock is {abs(ahead) * 1e3:.1f} ms {how} that of this host (± {round_trip / 2 * 1e3:.1f} ms)"
    if abs(ahead) - round_trip / 2 > MAX_SKEW_SECONDS:
        yield warning(
            "clock skew",
            f"{text}; deadlines do not mind, but times in logs and in status of both hosts cannot be compared",
            "let a time service keep both: chrony, or timedatectl set-ntp true",
        )
    else:
        yield ok("clock skew", text)


def _check_versions(found: PathMeasurement, software: Software) -> Iterator[Finding]:
    assert found.peer is not None
    peer, findings = found.peer, []
    if distance := release_distance(peer.release, software.release):
        text = f"{peer.hostname} has collectived {peer.release}, this host {software.release}"
        grade = failure if distance > 1 else warning
        findings.append(
            grade("versions", text, f"install collectived {newer_release(peer.release, software.release)} on both")
        )
    if parse_version(peer.python)[:2] != parse_version(software.python)[:2]:
        text = f"{peer.hostname} has Python {peer.python}, this host {software.python}: programs may differ there"
        findings.append(warning("versions", text, "install the same Python on all hosts"))
    here = {library.name: library.installed or "" for library in software.libraries}
    # Results are the same bits where the same NumPy folds them.
    if "numpy" in here and peer.libraries.get("numpy", here["numpy"]) != here["numpy"]:
        text = f"{peer.hostname} has numpy {peer.libraries['numpy']}, this host {here['numpy']}"
        findings.append(warning("versions", text, f"pip install numpy=={here['numpy']} there"))
    yield from findings
    if not findings:
        yield ok("versions", f"{peer.hostname} has the same: collectived {peer.release}, Python {peer.python}")


def newer_release(one: str, other: str) -> str:
    return max(one, other, key=parse_version)
