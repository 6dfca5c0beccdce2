"""Hosts on one machine behind a wire with a rate and a delay, where the kernel has no ``tc netem``.

Each host is a network namespace with a tun device. A thread of this process reads their packets and
writes each to its receiver, at a limited rate for each host and after a delay.
Needs root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

#: From linux/if_tun.h: attach to a device; packets of IP, without a header of tun's own.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
#: From linux/sched.h, for setns.
CLONE_NEWNET = 0x40000000
#: Bytes of a packet. Packets are large because each costs this process some 20 us.
MTU = 60_000


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


def usable() -> bool:
    """Whether this process may create the wire."""
    return os.geteuid() == 0 and os.access("/dev/net/tun", os.W_OK)


@contextmanager
def namespace(name: str) -> Iterator[str]:
    sh(f"ip netns add {name}")
    try:
        sh(f"ip -n {name} link set lo up")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name])


def enter(name: str) -> None:
    """Move this thread to a namespace, with the connections and threads that it starts from now
    on."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(f"setns: no namespace {name} for this process")


@contextmanager
def slow_wire(names: list[str], rate: float, delay: float) -> Iterator[threading.Event]:
    """A device ``wire`` in each namespace, with the addresses 10.77.0.1, .2, ...; ``rate`` is in
    bytes per second, ``delay`` in seconds. The event cuts the wire: packets are lost silently."""
    with ExitStack() as stack:
        devices = []
        for number, name in enumerate(names, start=1):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, device)
            request = struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(device, TUNSETIFF, request)
            sh(f"ip link set {name} netns {name}")
            sh(f"ip -n {name} link set {name} name wire mtu {MTU} txqueuelen 1000")
            sh(f"ip -n {name} addr add 10.77.0.{number}/24 dev wire")
            sh(f"ip -n {name} link set wire up")
            devices.append(device)
        over = threading.Event()
        thread = threading.Thread(target=carry, args=(devices, rate, delay, over))
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield over


def carry(devices: list[int], rate: float, delay: float, over: threading.Event) -> None:
    """Carry packets: each waits for earlier packets of its device, then for the delay."""
    free = [0.0] * len(devices)
    under_way: list[deque[tuple[float, int, bytes]]] = [deque() for _ in devices]
    while not over.is_set():
        due = min((queue[0][0] for queue in under_way if queue), default=float("inf"))
        wait = min(max(due - time.monotonic(), 0), 0.05)
        for device in select.select(devices, [], [], wait)[0]:
            source, packet = devices.index(device), os.read(device, MTU)
            now = time.monotonic()
            free[source] = max(free[source], now) + len(packet) / rate
            target = packet[19] - 1  # the last byte of the receiver's address
            if packet[0] >> 4 == 4 and 0 <= target < len(devices):
                under_way[source].append((free[source] + delay, devices[target], packet))
        now = time.monotonic()
        for queue in under_way:
            while queue and queue[0][0] <= now:
                _, target, packet = queue.popleft()
                os.write(target, packet)
