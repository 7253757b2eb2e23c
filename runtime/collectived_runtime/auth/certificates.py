"""The certificates of a daemon, read again whenever their files have changed.

A caller gets the content of the files when they were last valid. A file that is broken after a change is logged once,
and the former content stays in use. Nothing watches the files; they are checked at each connection, in or out.
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

from collectived_proto.config.daemons import DaemonSettings
from collectived_proto.tls.client import channel_credentials, diagnose_connection
from collectived_proto.tls.files import (
    TlsFileError,
    TlsFiles,
    TlsMaterial,
    client_context,
    load_material,
    server_context,
)
from collectived_runtime.auth.peers import is_unix_address
from collectived_runtime.startup_error import StartupError

log = logging.getLogger("collectived.certificates")
_TRIES = 3  # to read files of which one changes amid it


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """The TLS contexts in use.

    `http_server`, `link_server` and `link_client` are contexts of Python's ssl: for pages, and for links.
    """

    material: TlsMaterial
    http_server: ssl.SSLContext | None = None
    link_server: ssl.SSLContext | None = None
    link_client: ssl.SSLContext | None = None


class Certificates:
    """Those of one daemon. Thread-safe.

    Raises:
        StartupError: they cannot be used as they are.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        try:
            self._loaded_version, self._current = _load_contexts(files)
        except TlsFileError as error:
            raise StartupError(str(error)) from None

    @property
    def has_server_tls(self) -> bool:
        """Whether this daemon speaks TLS where it listens at TCP."""
        return self._files.cert is not None

    @property
    def is_mutual(self) -> bool:
        """Whether callers over TCP have shown certificates, and so do both sides of links."""
        return self.has_server_tls and self._files.ca is not None

    @property
    def has_client_tls(self) -> bool:
        """Whether this daemon speaks TLS when it calls others over TCP."""
        return bool(self._files)

    def load_current(self) -> TlsContexts:
        """Return the contexts from the files as they are, or as they were when last valid."""
        with self._lock:
            if (moment := self._files.fingerprint()) != self._loaded_version:
                self._loaded_version = moment
                try:
                    self._loaded_version, self._current = _load_contexts(self._files)
                    log.info("certificates were read again")
                except TlsFileError as error:
                    log.warning("certificates have changed and cannot be used, the former ones stay: %s", error)
            return self._current

    def get_http_context(self) -> ssl.SSLContext:
        """The TLS context for pages now. A reader of pages shows a token, and no certificate."""
        serving = self.load_current().http_server
        assert serving is not None, "this daemon has no certificate"
        return serving

    def get_link_contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """With what links are accepted and with what they are dialled now; only where this daemon is `is_mutual`."""
        now = self.load_current()
        assert now.link_server and now.link_client, "this daemon does not ask others for certificates"
        return now.link_server, now.link_client

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC, which asks again at every handshake."""
        given = self._make_server_configuration()
        return grpc.dynamic_ssl_server_credentials(given, self._make_server_configuration, self.is_mutual)

    def channel(self, address: str, options: Iterable[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel to an address: over TLS where it is not on this host and we have anything to speak it with."""
        if is_unix_address(address) or not self.has_client_tls:
            return grpc.aio.insecure_channel(address, options=tuple(options))
        return grpc.aio.secure_channel(
            address, channel_credentials(self.load_current().material), options=tuple(options)
        )

    async def explain_failure(self, address: str) -> str:
        """Explain why TLS may be the reason that no answer comes from there; '' where it is not."""
        if not self.has_client_tls:
            return await asyncio.to_thread(diagnose_connection, address, None)
        return await asyncio.to_thread(diagnose_connection, address, self.load_current().material)

    def _make_server_configuration(self) -> grpc.ServerCertificateConfiguration:
        material = self.load_current().material
        pairs = [(material.key, material.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, material.ca or None)


def load_certificates(settings: DaemonSettings, listen: Iterable[str]) -> Certificates:
    """Load the configured certificates of a daemon that is to listen there.

    Raises:
        StartupError: they cannot be used, or do not say with what to serve.
    """
    files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    plain = [address for address in listen if not is_unix_address(address)]
    if files.ca and not files.cert and plain:
        raise StartupError(
            f"--tls-ca {files.ca} names the authorities of callers, and {', '.join(plain)} would be served in "
            "plain text: give --tls-cert and --tls-key too"
        )
    return Certificates(files)


def _load_contexts(files: TlsFiles) -> tuple[object, TlsContexts]:
    """Load the files. Return the contexts, and the state of the files.

    Raises:
        TlsFileError: as `load_material`.
    """
    for _ in range(_TRIES):
        before = files.fingerprint()
        material = load_material(files, serves=True)
        current = TlsContexts(
            material,
            server_context(material, demand=False) if material.cert else None,
            server_context(material, demand=True) if material.is_mutual else None,
            client_context(material) if material.is_mutual else None,
        )
        if files.fingerprint() == before:
            return before, current
    raise TlsFileError("the files of certificates change while they are read: write each whole, then rename it")
