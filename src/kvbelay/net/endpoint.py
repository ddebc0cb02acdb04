"""Where a side listens and what its peers have to prove: the part of a configuration that all protocols share."""

from __future__ import annotations

import msgspec

from kvbelay.errors import ConfigError
from kvbelay.net.auth import FilePath, Trust
from kvbelay.net.sockets import Address, Listener, parse
from kvbelay.net.tls import MutualTls, TlsConfig
from kvbelay.net.token import SharedToken, load_token


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses are ``unix:///path``, ``tcp://10.0.0.1:port`` or ``tcp://[fd00::1]:port``; beyond loopback only with a
    token or TLS.
    """

    listen: str | None = None
    """Where this side serves its peers; port 0: the system chooses. None: it only dials."""
    advertise: str | None = None
    """What peers dial, where that is not `listen`; port 0: the one that it listens on."""
    token_file: FilePath | None = None
    """The file that holds the token which all peers share: 32 random bytes at least, for its owner only."""
    tls: TlsConfig | None = None
    """Certificates for mutual TLS."""


def trust_of(config: Endpoint) -> Trust:
    """What both ends of its connections prove. Raises `ConfigError` if a file that is named cannot be used."""
    if config.token_file is not None and config.tls is not None:
        msg = "the certificates of tls prove already what a token would"
        raise ConfigError(msg, field="token_file", remedy="leave one of the two out")
    if config.tls is not None:
        return MutualTls(config.tls)
    return Trust() if config.token_file is None else SharedToken(load_token(config.token_file, "token_file"))


def dialled(text: str, field: str, trust: Trust) -> Address:
    """A peer's address. Raises `ConfigError` for ``field`` if it is none, or one that the trust does not allow."""
    address = parse(text, field=field)
    trust.allow(address, field)
    if address.wildcard:
        msg = f"{address} stands for all addresses of a host, and nobody can dial it"
        raise ConfigError(msg, field=field, remedy="write the one address that peers reach")
    return address


def listening(config: Endpoint, trust: Trust) -> tuple[Listener | None, Address | None]:
    """What it listens on, and what its readers dial. Raises `ConfigError`, also where the address is in use."""
    told = None if config.advertise is None else dialled(config.advertise, "advertise", trust)
    if config.listen is None:
        if told is not None:
            raise ConfigError("nothing is listened on", field="advertise", remedy="set listen too, or leave it out")
        return None, None
    bound = parse(config.listen, field="listen")
    trust.allow(bound, "listen")
    if told is None and bound.wildcard:
        msg = f"{bound} stands for all addresses of this host, and readers have to dial one of them"
        raise ConfigError(msg, field="advertise", remedy="name the address that readers reach")
    listener = Listener(bound, field="listen")
    if told is not None and told.host and not told.port:
        told = Address(host=told.host, port=listener.address.port)
    return listener, told or listener.address
