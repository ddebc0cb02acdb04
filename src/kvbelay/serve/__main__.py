"""A server's process."""

from __future__ import annotations

import logging
import sys

from kvbelay.errors import KvbelayError
from kvbelay.serve.app import serve
from kvbelay.serve.settings import read_settings


def main() -> None:
    """Serve as the one argument says, and log to standard error. Exit code 2 for what the operator can mend."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(read_settings(sys.argv[1] if len(sys.argv) > 1 else ""))
    except (KvbelayError, OSError) as exc:
        sys.exit(f"Error: {exc}")


if __name__ == "__main__":
    main()
