"""The certificates of a daemon, read again whenever their files have changed.

Who asks gets what the files held when they last made sense: a file that is broken after a change is said once, and
what was there before stays. Nothing watches the files; they are looked at when somebody comes or is called.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from collectived_proto.configuration.daemons import DaemonSettings
from collectived_proto.tls.dialling import channel_credentials, why_not
from collectived_proto.tls.files import Files, Material, Unusable, client_context, load, server_context
from collectived_runtime.admission import is_local
from collectived_runtime.cannot_start import CannotStart

log = logging.getLogger("collectived.certificates")
_TRIES = 3  # to read files of which one changes amid it


@dataclass(frozen=True, slots=True)
class Current:
    """What is in use. `serving`, `linking` and `dialling` are contexts of Python's ssl: for pages, and for links."""

    material: Material
    serving: ssl.SSLContext | None = None
    linking: ssl.SSLContext | None = None
    dialling: ssl.SSLContext | None = None


class Certificates:
    """Those of one daemon. Thread-safe.

    Raises:
        CannotStart: they cannot be used as they are.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        try:
            self._seen, self._current = _read(files)
        except Unusable as error:
            raise CannotStart(str(error)) from None

    @property
    def serves(self) -> bool:
        """Whether this daemon speaks TLS where it listens at TCP."""
        return self._files.cert is not None

    @property
    def mutual(self) -> bool:
        """Whether who comes over TCP has proved who it is, and so do links, both ways."""
        return self.serves and self._files.ca is not None

    @property
    def dials(self) -> bool:
        """Whether this daemon speaks TLS with whom it calls over TCP."""
        return bool(self._files)

    def current(self) -> Current:
        """What the files hold, or held when they last made sense."""
        with self._lock:
            if (moment := self._files.moment()) != self._seen:
                self._seen = moment
                try:
                    self._seen, self._current = _read(self._files)
                    log.info("certificates were read again")
                except Unusable as error:
                    log.warning("certificates have changed and cannot be used, the former ones stay: %s", error)
            return self._current

    def pages(self) -> ssl.SSLContext:
        """What pages are served with now. Who looks at them shows a token, and no certificate."""
        serving = self.current().serving
        assert serving is not None, "this daemon has no certificate"
        return serving

    def links(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """With what links are accepted and with what they are dialled now; only where this daemon is `mutual`."""
        now = self.current()
        assert now.linking and now.dialling, "this daemon does not ask others for certificates"
        return now.linking, now.dialling

    def server_credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks again at every handshake."""
        given = self._given()
        return grpc.dynamic_ssl_server_credentials(given, self._given, self.mutual)

    def channel(self, address: str, options: Iterable[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel to an address: over TLS where it is not on this host and we have anything to speak it with."""
        if is_local(address) or not self.dials:
            return grpc.aio.insecure_channel(address, options=tuple(options))
        return grpc.aio.secure_channel(address, channel_credentials(self.current().material), options=tuple(options))

    async def why_not(self, address: str) -> str:
        """Why TLS may be the reason that nobody answers there; '' where it is not."""
        if not self.dials:
            return await asyncio.to_thread(why_not, address, None)
        return await asyncio.to_thread(why_not, address, self.current().material)

    def _given(self) -> grpc.ServerCertificateConfiguration:
        material = self.current().material
        pairs = [(material.key, material.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, material.ca or None)


def certificates(settings: DaemonSettings, listen: Iterable[str]) -> Certificates:
    """Those that a daemon was told of, who is to listen there.

    Raises:
        CannotStart: they cannot be used, or do not say with what to serve.
    """
    files = Files(settings.tls_cert, settings.tls_key, settings.tls_ca)
    plain = [address for address in listen if not is_local(address)]
    if files.ca and not files.cert and plain:
        raise CannotStart(
            f"--tls-ca {files.ca} says whose certificates others must show, and {', '.join(plain)} would be served in "
            "plain text: give --tls-cert and --tls-key too"
        )
    return Certificates(files)


def _read(files: Files) -> tuple[object, Current]:
    """What they hold, and the moment of it.

    Raises:
        Unusable: as `load`.
    """
    for _ in range(_TRIES):
        before = files.moment()
        material = load(files, serves=True)
        current = Current(
            material,
            server_context(material, demand=False) if material.cert else None,
            server_context(material, demand=True) if material.mutual else None,
            client_context(material) if material.mutual else None,
        )
        if files.moment() == before:
            return before, current
    raise Unusable("the files of certificates change while they are read: write each whole, then rename it")
