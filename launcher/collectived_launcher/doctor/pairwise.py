"""The two ends of a measuring session as commands: `doctor --serve` on one host, `doctor --to` on another."""

from __future__ import annotations

import json

import click

from collectived_launcher.doctor.checks import CHECKS, evaluate_measurement
from collectived_launcher.doctor.collect import collect_facts
from collectived_launcher.doctor.facts import Facts, PeerFacts, UnknownFact
from collectived_launcher.doctor.finding import Finding
from collectived_launcher.doctor.measure import MeasurementRefused, MeasurementServer, measure_path, new_token

_PEER_CHECKS = [check for check in CHECKS if check.name in ("python", "interfaces")]


def serve(host: str, port: int, within: float, as_json: bool) -> int:
    """Waits for one session; returns the exit status.

    Args:
        as_json: print the address and the token as one line of JSON, and nothing else.
    """
    token = new_token()
    try:
        server = MeasurementServer(host, port, token, describe_this_host(collect_facts({}, _PEER_CHECKS)))
    except OSError as error:
        raise click.ClickException(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    with server:
        address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
        if as_json:
            click.echo(json.dumps({"address": address, "token": token}))
        else:
            click.echo(
                f"waiting at {address} for one measurement, {within:g} s at most; on the other host, type\n"
                f"    collectived doctor --to {address}\n"
                f"and give it this token, which is good once: {token}"
            )
        try:
            peer = server.serve(within)
        except TimeoutError:
            raise click.ClickException(f"nobody with the token came to {address} within {within:g} s") from None
        except (MeasurementRefused, OSError, ValueError) as error:
            raise click.ClickException(f"the measurement at {address} broke off: {error}") from error
    if not as_json:
        click.echo(f"measured with {peer.hostname}, which shows the result")
    return 0


def dial(host: str, port: int, token: str) -> tuple[list[Finding], Facts]:
    """What measuring to a server has found, and the facts that it was judged with."""
    facts = collect_facts({}, _PEER_CHECKS)
    found = measure_path(host, port, token, describe_this_host(facts))
    return list(evaluate_measurement(found, facts, found.peer.hostname if found.peer else host)), facts


def describe_this_host(facts: Facts) -> PeerFacts:
    """What this host says of itself to the other."""
    network, software = facts.network, facts.software
    hostname = "unknown" if isinstance(network, UnknownFact) else network.hostname
    if isinstance(software, UnknownFact):
        return PeerFacts(hostname, "0", "0", {})
    libraries = {library.name: library.installed or "" for library in software.libraries}
    return PeerFacts(hostname, software.release, software.python, libraries)
