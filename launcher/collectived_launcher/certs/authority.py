"""Certificates as values: an authority's own, those that it issues, and the same again for longer. Pure but for keys.

Keys are ECDSA on P-256: small, fast to prove with, and known to every library that speaks TLS.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCK_SKEW = timedelta(minutes=5)  # that a certificate is good for before it was made: clocks differ
PrivateKey = ec.EllipticCurvePrivateKey
Certificate = x509.Certificate
_SERVER_AUTH, _CLIENT_AUTH = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and the key that proves it. Both as the files have them: PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: Certificate
    key: PrivateKey


def create_authority(name: str, days: int, now: datetime) -> IssuedCertificate:
    """An authority that signs itself, and whose certificates sign nothing."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _make_subject(name)
    made = (
        _start_builder(subject, subject, key.public_key(), now, now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return IssuedCertificate(_pem(made), _key_pem(key))


def issue(authority: Authority, name: str, names: Sequence[str], days: int, now: datetime) -> IssuedCertificate:
    """Make a certificate for serving under `names` (hosts and IP addresses), or, without any, for calling only."""
    key = ec.generate_private_key(ec.SECP256R1())
    until = _clamp_expiry(authority, now + timedelta(days=days))
    builder = _start_builder(_make_subject(name), authority.certificate.subject, key.public_key(), now, until)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([_SERVER_AUTH, _CLIENT_AUTH] if names else [_CLIENT_AUTH]), critical=False
    )
    if names:
        alternative = x509.SubjectAlternativeName([_make_alternative_name(one) for one in dict.fromkeys(names)])
        builder = builder.add_extension(alternative, critical=False)
    return IssuedCertificate(_pem(_sign(builder, authority)), _key_pem(key))


def renew_certificate(authority: Authority, former: Certificate, now: datetime) -> bytes:
    """The same certificate for as long again: its key, its names and what it is good for stay."""
    lasting = former.not_valid_after_utc - former.not_valid_before_utc - CLOCK_SKEW
    key = former.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    builder = _start_builder(
        former.subject, authority.certificate.subject, key, now, _clamp_expiry(authority, now + lasting)
    )
    for kind in (x509.ExtendedKeyUsage, x509.SubjectAlternativeName):
        try:
            kept = former.extensions.get_extension_for_class(kind)
        except x509.ExtensionNotFound:
            continue
        builder = builder.add_extension(kept.value, critical=kept.critical)
    return _pem(_sign(builder, authority))


def get_names(certificate: Certificate) -> list[str]:
    """The host names and addresses that it is good for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = found.get_values_for_type(x509.IPAddress)
    return [*found.get_values_for_type(x509.DNSName), *(str(address) for address in addresses)]


def is_issued_by(certificate: Certificate, authority: Certificate) -> bool:
    """Whether that authority has signed it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except Exception:  # of several kinds, and each means no
        return False
    return True


def _make_subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _start_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _sign(builder: x509.CertificateBuilder, authority: Authority) -> Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _clamp_expiry(authority: Authority, wished: datetime) -> datetime:
    """No certificate is valid for longer than that of the authority that signed it."""
    return min(wished, authority.certificate.not_valid_after_utc)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _make_alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
