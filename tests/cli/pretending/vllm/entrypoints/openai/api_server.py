"""``--model MODEL ...``: answers for its health, and has a process of its own that heeds no signal.

MODEL says how it behaves: a folder named ``dies`` or ``hangs``, or another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    """200 for everything."""

    def do_GET(self) -> None:  # the library's name
        """Health."""
        self.send_response(200)
        self.end_headers()


def main() -> None:
    """Serve."""
    model = Path(sys.argv[sys.argv.index("--model") + 1])
    port = int(sys.argv[sys.argv.index("--port") + 1])
    subprocess.Popen([sys.executable, "-c", CHILD])
    seen = {"argv": sys.argv[1:], "environment": {key: os.environ.get(key, "") for key in os.environ if "_" in key}}
    (model / f"{port}.json").write_text(json.dumps(seen), encoding="utf-8")
    sys.stderr.write("the engine begins\n")
    if model.name == "dies":
        raise RuntimeError("no kernel for this GPU")
    if model.name == "hangs":
        time.sleep(600)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
