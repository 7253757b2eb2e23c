"""Certificates for tests: an authority in a folder, and whatever it issues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from collectived_launcher.certs.authority import Authority, IssuedCertificate, PrivateKey, create_authority, issue
from collectived_proto.tls.files import TlsFiles

HERE = ("localhost", "127.0.0.1")


class Signer:
    """Its folder has `ca.crt`, and a certificate and key of each name that is issued."""

    def __init__(self, folder: Path, name: str = "an authority of these tests") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        made = create_authority(name, 365, datetime.now(UTC))
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(made.certificate)
        key = serialization.load_pem_private_key(made.key, None)
        assert isinstance(key, PrivateKey)
        self._authority = Authority(x509.load_pem_x509_certificate(made.certificate), key)

    def issue(
        self, name: str, names: tuple[str, ...] = HERE, begun: timedelta = timedelta(), days: int = 1
    ) -> TlsFiles:
        """Files of a new certificate, which began to be good so long ago; those of the same name are replaced."""
        self.replace(name, self.issued(name, names, begun, days))
        return TlsFiles(self.folder / f"{name}.crt", self.folder / f"{name}.key", self.ca)

    def issued(
        self, name: str, names: tuple[str, ...] = HERE, begun: timedelta = timedelta(), days: int = 1
    ) -> IssuedCertificate:
        return issue(self._authority, name, names, days, datetime.now(UTC) - begun)

    def expired(self, name: str) -> TlsFiles:
        return self.issue(name, begun=timedelta(days=3))

    def replace(self, name: str, issued: IssuedCertificate) -> None:
        """Each file at once, as whoever renews certificates does it."""
        for ending, content in (("key", issued.key), ("crt", issued.certificate)):
            draft = self.folder / f"{name}.{ending}.new"
            draft.touch(mode=0o600)
            draft.write_bytes(content)
            draft.rename(self.folder / f"{name}.{ending}")


def flags(files: TlsFiles) -> tuple[str, ...]:
    """As a daemon is told of them."""
    told = {"--tls-cert": files.cert, "--tls-key": files.key, "--tls-ca": files.ca}
    return tuple(word for flag, path in told.items() if path for word in (flag, str(path)))


def variables(files: TlsFiles) -> dict[str, str]:
    """As a caller is told of them."""
    told = {"COLLECTIVED_TLS_CERT": files.cert, "COLLECTIVED_TLS_KEY": files.key, "COLLECTIVED_TLS_CA": files.ca}
    return {name: str(path) for name, path in told.items() if path}
