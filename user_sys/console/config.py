"""The settings of a console."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from hal.settings import Port
from user_sys.errors import ConfigError
from user_sys.tunnel.limits import LOOPBACK_HOSTS

ADDRESS_MODE = 0o600  # of a file with the address of a page, which has a secret


@dataclass(frozen=True)
class ConsoleConfig:
    """The web page on which people watch and take over.

    Attributes:
        enabled: whether it is served.
        host: address to listen on. Beyond loopback it requires accounts (`user-sys console user add`) and uses HTTPS.
        port: 0 takes a free one.
        certificate, certificate_key: PEM files for HTTPS; empty for a self-signed certificate.
        public_url: https://HOST of a reverse proxy that serves the console; people then sign in with accounts.
    """

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Port = 8088
    certificate: str = ""
    certificate_key: str = ""
    public_url: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.certificate_key):
            raise ConfigError("console: certificate and certificate_key belong together; set both or none")
        if self.certificate and self.is_loopback:
            raise ConfigError(
                f"console.certificate is for HTTPS, but console.host {self.host} is loopback; set the host"
            )
        parts = urlsplit(self.public_url)
        if self.public_url and (parts.scheme != "https" or not parts.netloc or parts.path.strip("/")):
            raise ConfigError(
                f"console.public_url is {self.public_url!r}; write it as https://HOST or https://HOST:PORT"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this computer reach its port."""
        return self.host in LOOPBACK_HOSTS

    @property
    def has_accounts(self) -> bool:
        """Whether people sign in; else the address has a secret."""
        return not self.is_loopback or bool(self.public_url)


def require_certificate(config: ConsoleConfig) -> None:
    """Raises ConfigError: the certificate or its key cannot be read, is encrypted, or is of another one."""
    if not config.certificate:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.certificate, config.certificate_key, password="")  # an empty one: never asks
    except OSError as error:
        raise ConfigError(
            f"console: {config.certificate} and {config.certificate_key} cannot be used ({error.strerror}): give a "
            "certificate and its key as PEM files that this user can read, without a password"
        ) from None


def as_before(config: ConsoleConfig, address: Path) -> tuple[ConsoleConfig, str]:
    """The port and the secret of an earlier process, from its file `address`, so that open pages connect again."""
    if not address.exists():
        return config, ""
    parts = urlsplit(address.read_text())
    token = parse_qs(parts.query).get("token", [""])[0]
    return (config if config.port else replace(config, port=parts.port or 0)), token
