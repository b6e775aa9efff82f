"""Throw-away certificates and credentials of a test cluster."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=30)


class Authority:
    """A certificate authority, and the files it signs, in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("trireme-test", [])
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).add_extension(usage, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self._write("ca", self._key, self._certificate)

    def sign(self, file: str, name: str, organisation: str = "", hosts: tuple[str, ...] = ()) -> None:
        """Write ``file``.crt and ``file``.key of a server or client."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_subject(name, [organisation] if organisation else []), key.public_key())
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([_host(host) for host in hosts or (name.replace(":", "-"),)])
        builder = builder.add_extension(purposes, critical=False).add_extension(names, critical=False)
        self._write(file, key, builder.sign(self._key, hashes.SHA256()))

    def signing_key(self, file: str) -> None:
        """Write the key pair with which service accounts' tokens are signed: ``file``.key and ``file``.pub."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._write_key(file, key)
        public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (self.folder / f"{file}.pub").write_bytes(public)

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + _LIFE)

    def _write(self, file: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._write_key(file, key)
        (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _write_key(self, file: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
        path = self.folder / f"{file}.key"
        path.touch(mode=0o600)
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))


class Users:
    """Users of an API server, known by token: its token file, and a kubeconfig for each."""

    def __init__(self, folder: Path, server: str, authority: Path):
        self._folder, self._server, self._authority = folder, server, authority
        self.tokens = folder / "tokens.csv"
        self.tokens.touch(mode=0o600)

    def add(self, file: str, name: str, groups: str = "", namespace: str = "default") -> Path:
        """The kubeconfig of a new user. The API server reads the token file when it starts."""
        token = secrets.token_hex(16)
        with self.tokens.open("a") as stream:
            stream.write(f'{token},{name},{name},"{groups}"\n')
        path = self._folder / f"{file}.kubeconfig"
        path.touch(mode=0o600)
        cluster = {"server": self._server, "certificate-authority": str(self._authority)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))
        return path


def _subject(name: str, organisations: list[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, o) for o in organisations]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
