"""Print the state of one network device and whether other addresses answer, once a second.

    python3 - REQUEST < probe.py         REQUEST: {"address", "nic", "peers": [ADDRESS, ...]}

An empty `nic` is looked up by `address`. One JSON line a second until standard output closes:
    {"nic", "carrier": true | false | null, "changes": n, "errors": n, "peers": {ADDRESS: bool}}
Standard library of Python 3.8; changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NET = Path("/sys/class/net")
EVERY_S = 1.0
LOST_AFTER = 3
SIOCGIFADDR = 0x8915


def read(nic: str, name: str) -> str:
    try:
        return (NET / nic / name).read_text().strip()
    except OSError:
        return ""


def nic_of(address: str) -> str:
    """The device that holds an IPv4 address; empty when there is none."""
    for nic in sorted(path.name for path in NET.iterdir()):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", nic.encode()[:15]))
            except OSError:
                continue
        if socket.inet_ntoa(packed[20:24]) == address:
            return nic
    return ""


def carrier(nic: str) -> bool | None:
    """Whether there is a link; None for no such device. A device that is down cannot be read."""
    if not (NET / nic).is_dir():
        return None
    return read(nic, "carrier") == "1"


def number(nic: str, *names: str) -> int:
    values = [read(nic, name) for name in names]
    return sum(int(value) for value in values if value.isdigit())


class Peer:
    """Pings one address; `answers` is None until it answered once."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: bool | None = None
        self.missed = 0
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        command = ["ping", "-n", "-q", "-c", "1", "-W", "1", self.address]
        while True:
            begin = time.monotonic()
            try:
                code = subprocess.call(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, timeout=10,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 1
            except OSError:
                return
            self.missed = 0 if code == 0 else self.missed + 1
            if code == 0:
                self.answers = True
            elif self.answers and self.missed >= LOST_AFTER:
                self.answers = False
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - begin)))


def main(request: dict[str, Any]) -> None:
    nic = request["nic"] or nic_of(request["address"])
    peers = [Peer(address) for address in request["peers"]]
    while True:
        line = {
            "nic": nic,
            "carrier": carrier(nic) if nic else None,
            "changes": number(nic, "carrier_changes"),
            "errors": number(nic, "statistics/rx_errors", "statistics/tx_errors"),
            "peers": {peer.address: peer.answers for peer in peers},
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
