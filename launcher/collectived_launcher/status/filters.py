"""The part of a status that is about one group, or about one host. Pure: a reply in, a smaller one out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from collectived_proto.report.findings import StatusFinding, collect_findings, short_group_name
from collectived_proto.v1 import status_pb2 as pb


def filter_status(reply: pb.StatusReply, group: str | None = None, host: str | None = None) -> pb.StatusReply:
    """Return the part of a status that concerns this group (by its short or whole name) and this host.

    Of a group, workers are those that its members are on; of a host, groups those that have members there, which alone
    are listed.

    Raises:
        click.UsageError: there is no such group or host; the text names those that are.
    """
    part = pb.StatusReply()
    part.CopyFrom(reply)
    if group is not None:
        _keep_group(part, group)
    if host is not None:
        _keep_host(part, host)
    return part


def _keep_group(part: pb.StatusReply, name: str) -> None:
    names = {one.name for one in part.groups} | {failure.verdict.group for failure in part.failures}
    chosen = {whole for whole in names if name in (whole, short_group_name(part, whole))}
    if not chosen:
        known = ", ".join(sorted(short_group_name(part, whole) for whole in names))
        raise click.UsageError(f"no group {name!r}; there {f'is {known}' if known else 'are no groups'}")
    _keep(part.groups, [one for one in part.groups if one.name in chosen])
    _keep(part.failures, [failure for failure in part.failures if failure.verdict.group in chosen])
    tasks = {member.worker for one in part.groups for member in one.members}
    _keep(part.workers, [worker for worker in part.workers if worker.task in tasks])


def _keep_host(part: pb.StatusReply, host: str) -> None:
    workers = [worker for worker in part.workers if worker.host == host]
    if not workers:
        known = ", ".join(sorted({worker.host for worker in part.workers}))
        raise click.UsageError(f"no worker on host {host!r}; there are workers on {known or 'none'}")
    _keep(part.workers, workers)
    tasks = {worker.task for worker in workers}
    _keep(part.groups, [group for group in part.groups if any(member.worker in tasks for member in group.members)])
    for group in part.groups:
        _keep(group.members, [member for member in group.members if member.worker in tasks])
        _keep(group.left, [member for member in group.left if member.worker in tasks])
    names = {group.name for group in part.groups}
    _keep(part.failures, [failure for failure in part.failures if failure.verdict.group in names])


def _keep(field: Any, kept: Sequence[Any]) -> None:
    chosen = list(kept)
    del field[:]
    field.extend(chosen)


def filter_findings(whole: pb.StatusReply, part: pb.StatusReply) -> list[StatusFinding]:
    """The findings of the part, in the words of the whole: missing ranks may be on another host."""
    if part is whole:
        return collect_findings(whole)
    groups = {short_group_name(part, group.name) for group in part.groups}
    groups |= {short_group_name(part, failure.verdict.group) for failure in part.failures}
    tasks = {worker.task for worker in part.workers}
    return [
        finding
        for finding in collect_findings(whole)
        if finding.group in groups | {""} and (finding.worker is None or finding.worker in tasks)
    ]
