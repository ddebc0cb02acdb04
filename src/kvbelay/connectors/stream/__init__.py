"""Batches over unix and TCP sockets, served from the source's own memory, straight into the reader's blocks."""

from kvbelay.connectors.stream.connector import BACKEND, StreamBackend, StreamConfig, StreamConnector
from kvbelay.net.tls import TlsConfig

__all__ = ["BACKEND", "StreamBackend", "StreamConfig", "StreamConnector", "TlsConfig"]
