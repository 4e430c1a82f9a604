"""What a server opens to others: one TCP port, and sockets that only its user can reach."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
from robustness_e2e import processes


def tree(root: int) -> list[int]:
    """A process and all below it."""
    found = [root]
    for pid, parent, _ in sorted(processes()):
        if parent in found:
            found.append(pid)
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    links = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(str(link.readlink()))
        except OSError:
            continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_one_port_is_open_and_no_named_socket(server: Any) -> None:
    pids = tree(server.process.pid)
    assert len(pids) >= 2, "the server and its engine"
    mine = set().union(*(sockets(pid) for pid in pids))
    listening = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in mine and (words[3] == "0A" or table.startswith("udp")):
                listening.append((table, int(words[1].rpartition(":")[2], 16)))
    assert listening == [("tcp", httpx.URL(server.url).port)]
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[6] in mine and not words[7].startswith("@"):
            path = Path(words[7])
            assert not path.exists() or stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path
