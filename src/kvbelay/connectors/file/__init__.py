"""A directory of batches, one file each: survives its writer, and several processes may share it."""

from kvbelay.connectors.file.connector import BACKEND, FileBackend, FileConfig, FileConnector

__all__ = ["BACKEND", "FileBackend", "FileConfig", "FileConnector"]
