"""What of this machine stands in the way of the same-host path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvbelay.connectors.stream.near import permitted

PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
STATUS = Path("/proc/self/status")
SYS_PTRACE = 19
"""The bit of the capability CAP_SYS_PTRACE."""
CHILDREN_ONLY, NOBODY = 1, 3
"""Of the scopes; the one between asks for the capability, as the first does of processes that are no children."""
PAGE = "docs/stream.md"


def checkup(ptrace: Path = PTRACE, status: Path = STATUS) -> Iterator[dict[str, object]]:
    """For ``kvbelay doctor``: whether one process may read another one's memory, which NIXL's ``cma`` needs, too."""
    scope = int(ptrace.read_text(encoding="ascii")) if ptrace.exists() else 0
    found = re.search(r"^CapEff:\s+([0-9a-f]+)$", status.read_text(encoding="ascii"), re.MULTILINE)
    privileged = found is not None and bool(int(found[1], 16) >> SYS_PTRACE & 1)
    slower = "stream uses the unix socket instead, and NIXL shared memory or tcp: slower, and right"
    if not permitted():
        yield {
            "what": "the system call process_vm_readv is forbidden here",
            "level": "warning",
            "evidence": [{"source": "process_vm_readv"}],
            "cause": f"a container's seccomp profile, most often. {slower}",
            "remedy": "allow it in the profile (docker: --cap-add SYS_PTRACE)",
            "page": PAGE,
        }
    elif scope >= NOBODY or (scope >= CHILDREN_ONLY and not privileged):
        yield {
            "what": f"processes may not read one another's memory: ptrace_scope is {scope}",
            "level": "warning",
            "evidence": [{"source": str(ptrace), "text": str(scope)}],
            "cause": slower,
            "remedy": "sysctl kernel.yama.ptrace_scope=0, or give both processes CAP_SYS_PTRACE",
            "page": PAGE,
        }
