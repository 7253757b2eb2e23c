"""`collectived certs`: makes, shows and renews certificates of a private authority."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collectived_launcher.cluster.file import ClusterFileError, read_cluster

if TYPE_CHECKING:
    from collectived_launcher.certs.folder import CertificateEntry

INSTALL = "pip install 'collectived[tls]'"
_LOCAL = ("localhost", "127.0.0.1", "::1")  # a host is also called from itself
_FOLDER = click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="certs",
    show_default=True,
    help="Folder of the authority and of everything that it signs.",
)
_DAYS = click.IntRange(min=1, max=36500)


class _Certs(click.Group):
    """Says what is missing where the library for certificates is."""

    def invoke(self, context: click.Context) -> Any:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise click.ClickException(f"certificates are made by cryptography, which is missing: {INSTALL}") from None
        from collectived_launcher.certs.folder import CertificateFolderError

        try:
            return super().invoke(context)
        except CertificateFolderError as error:
            raise click.ClickException(str(error)) from None


@click.group(short_help="Make a certificate authority, and certificates for TLS.", cls=_Certs)
def certs() -> None:
    """Make a private certificate authority, and certificates of hosts and people.

    Each gets a folder with tls.crt, tls.key and ca.crt: the files of --tls-cert, --tls-key and --tls-ca.
    """


@certs.command()
@_FOLDER
@click.option("--days", type=_DAYS, default=3650, show_default=True, help="Days for which it is valid.")
@click.option("--name", default="collectived", show_default=True, help="Name of the authority.")
def init(folder: Path, days: int, name: str) -> None:
    """Make an authority. Its key stays in FOLDER/authority; keep it apart from the daemons."""
    from collectived_launcher.certs.authority import create_authority
    from collectived_launcher.certs.folder import AUTHORITY, CA, CA_KEY, create_authority_folder

    create_authority_folder(folder, create_authority(name, days, datetime.now(UTC)))
    click.echo(f"{folder / CA}: the certificate of the authority, for every host and client")
    click.echo(
        f"{folder / AUTHORITY / CA_KEY}: its private key: keep it secret, for its holder can admit any host or person"
    )


@certs.command()
@click.argument("hosts", nargs=-1, metavar="[HOST[=NAME,ADDRESS...]]...")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CLUSTER.toml",
    help="Every host of this cluster that has no certificate yet.",
)
@_FOLDER
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Days for which they are valid.")
def host(hosts: tuple[str, ...], cluster: Path | None, folder: Path, days: int) -> None:
    """Make certificates of hosts, valid for serving and for calling.

    A certificate has the name of its host, the names after the =, the addresses of the name on this machine, and the
    loopback. Callers refuse a daemon under any other name.
    """
    from collectived_launcher.certs.folder import check_free

    wanted = [*_parse_hosts(hosts), *(_list_cluster_hosts(cluster, folder) if cluster else ())]
    if not hosts and not cluster:
        raise click.UsageError("name hosts, or the file of a cluster: collectived certs host node1 node2=10.0.0.2")
    for name, _ in wanted:
        check_free(folder, name)
    for name, also in wanted:
        addresses = _resolve_addresses(name)
        if not addresses and not also:
            click.echo(f"{name} has no address here: it can only be called by its name; give some: {name}=10.0.0.2")
        _issue(folder, name, (name, *also, *addresses, *_LOCAL), days)


@certs.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_FOLDER
@click.option("--days", type=_DAYS, default=365, show_default=True, help="Days for which they are valid.")
def client(names: tuple[str, ...], folder: Path, days: int) -> None:
    """Make certificates of people and programs, valid for calling only."""
    from collectived_launcher.certs.folder import check_free

    for name in names:
        check_free(folder, name)
    for name in names:
        _issue(folder, name, (), days)


@certs.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="All of them, due or not.")
@_FOLDER
def renew(names: tuple[str, ...], everything: bool, folder: Path) -> None:
    """Renew certificates for their former duration: the named ones, else those with a third of their time left.

    Keys and names stay. Daemons read the new tls.crt as soon as it is in its place, without a restart.
    """
    from collectived_launcher.certs.authority import renew_certificate
    from collectived_launcher.certs.folder import CERT, list_entries, load_authority, replace_certificate

    own, now = load_authority(folder), datetime.now(UTC)
    known = {entry.name: entry for entry in list_entries(folder) if entry.name}
    for name in names:
        if name not in known:
            raise click.UsageError(f"{folder} has no certificate of {name!r}: it has {', '.join(known) or 'none'}")
    chosen = [known[name] for name in names] or [one for one in known.values() if everything or one.is_due(now)]
    for entry in chosen:
        if not entry.is_ours:
            raise click.ClickException(f"{folder / entry.name / CERT} is not of this authority: make it anew")
        replace_certificate(folder, entry.name, renew_certificate(own, entry.certificate, now))
        click.echo(f"{folder / entry.name / CERT}: renewed")
    if not chosen:
        click.echo("none is due: name those that are to be renewed, or say --all")


@certs.command()
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def show(folder: Path, as_json: bool) -> None:
    """Show certificates, their purpose, and their end."""
    from collectived_launcher.certs.folder import list_entries

    now = datetime.now(UTC)
    found = list_entries(folder)
    if as_json:
        click.echo(json.dumps([_document(entry, now) for entry in found], indent=2))
        return
    rows = [("certificate", "expires", "left", "good for"), *(_row(entry, now) for entry in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        click.echo("  ".join([*(f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _row(entry: CertificateEntry, now: datetime) -> tuple[str, str, str, str]:
    left = entry.days_left(now)
    said = "EXPIRED" if left < 0 else f"{left} d, renew it" if entry.name and entry.is_due(now) else f"{left} d"
    what = ", ".join(entry.names) or ("calling" if entry.name else "signing")
    return (
        entry.name or "ca.crt",
        f"{entry.expires:%Y-%m-%d}",
        said,
        what if entry.is_ours else "nothing: of another CA",
    )


def _document(entry: CertificateEntry, now: datetime) -> dict[str, Any]:
    return {
        "name": entry.name,
        "authority": not entry.name,
        "of_this_authority": entry.is_ours,
        "expires": entry.expires.isoformat(),
        "days_left": entry.days_left(now),
        "due": entry.is_due(now),
        "names": entry.names,
    }


def _issue(folder: Path, name: str, names: tuple[str, ...], days: int) -> None:
    from collectived_launcher.certs.authority import issue
    from collectived_launcher.certs.folder import load_authority, write_issued

    place = write_issued(folder, name, issue(load_authority(folder), name, names, days, datetime.now(UTC)))
    click.echo(f"{place}/: {', '.join(dict.fromkeys(names)) or 'for calling'}")


def _parse_hosts(hosts: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for text in hosts:
        name, _, also = text.partition("=")
        if not also.isascii() or not also.isprintable():
            raise click.UsageError(f"{text!r}: expected HOST=NAME,ADDRESS… in ASCII")
        yield name, tuple(filter(None, also.split(",")))


def _list_cluster_hosts(path: Path, folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    try:
        cluster = read_cluster(path)
    except ClusterFileError as error:
        raise click.UsageError(str(error)) from None
    hosts = [(host.name, (host.address,) if host.address else ()) for host in cluster.hosts]
    return [(name, also) for name, also in hosts if not (folder / name).exists()]


def _resolve_addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found))
