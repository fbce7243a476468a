"""`kvrelay certificates`: makes the certificates of a cluster's parts, signed by an authority of its own.

The authority's key signs all certificates, so it is kept away from the cluster. `kvrelay up` makes certificates for one
machine and keeps no key of their authority.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.cluster.errors import UsageError
from kvrelay.cluster.state import write_private
from kvrelay.rpc.certificates import dns_name
from kvrelay.rpc.security import PARTS

AUTHORITY = "ca"
AUTHORITY_DAYS = 3650
BACKDATED = timedelta(minutes=5)
"""How far back a certificate's start is dated, because machines' clocks differ."""


def make(folder: Path, days: int, keep_authority: bool) -> None:
    """Writes ca.crt, and PART.crt and PART.key for each part; files that are there are replaced.

    An authority that is there (ca.crt with ca.key) signs the new certificates; else a new one is made.

    Args:
        days: until the certificates end.
        keep_authority: whether to write ca.key, which can sign more certificates.

    Raises:
        UsageError: the folder can't be written, or its authority can't be read.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, key = _read_authority(folder) or _new_authority()
        for part in PARTS:
            part_key = ec.generate_private_key(ec.SECP256R1())
            usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            signed = (
                _builder(f"kvrelay {part}", certificate.subject, part_key, key, days)
                .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
                .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name(part))]), critical=False)
                .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
                .sign(key, hashes.SHA256())
            )
            # The key first: a process that reads in between finds a pair that doesn't match, and keeps its own.
            write_private(folder / f"{part}.key", _pem(part_key))
            write_private(folder / f"{part}.crt", signed.public_bytes(Encoding.PEM))
        if keep_authority:
            write_private(folder / f"{AUTHORITY}.key", _pem(key))
        write_private(folder / f"{AUTHORITY}.crt", certificate.public_bytes(Encoding.PEM))
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from None


def _read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    certificate, key = folder / f"{AUTHORITY}.crt", folder / f"{AUTHORITY}.key"
    if not key.exists():
        return None
    try:
        private = load_pem_private_key(key.read_bytes(), None)
        authority = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (ValueError, TypeError) as error:
        raise UsageError(f"{folder}: not an authority's ca.crt and ca.key: {error}") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != authority.public_key():
        raise UsageError(f"{key}: not the key of {certificate}, as `kvrelay certificates` makes it")
    return authority, private


def _new_authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    name = _name("kvrelay cluster")
    return (
        _builder("kvrelay cluster", name, key, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    ), key


def _builder(
    subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    """A certificate for `key`, to be signed by `signer`.

    All authorities have one name, so TLS needs the key identifiers to find the right one of several in ca.crt.
    """
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
