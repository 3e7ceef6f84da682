"""A cable between two network interfaces: it counts what crosses it, delays it, loses it or is cut.

Its ends are TUN devices, which hand over IP packets. Two sorts of TCP connections cross it. The
client of a TCPStore begins with a byte and a magic number (TCPStoreBackend.hpp). gloo sends frames
(gloo/transport/tcp/pair.h): 48 bytes of preamble, of which the first 8 are the frame's bytes and
the next 8 its kind, and maybe a piece of a tensor; who connects sends a number of 8 bytes before.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import threading
import time
from dataclasses import dataclass, field

MTU = 1500
PREAMBLE_BYTES, GREETING_BYTES = 48, 8
_MAGIC = struct.pack("=I", 0x3C85F7CE)
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SYN, _ACK = 0x02, 0x10


def open_end(name: str) -> int:
    """Make a TUN device and return the file in which its packets are read and written."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


@dataclass
class Traffic:
    """Bytes that have entered the cable, of both directions, by what they are."""

    tensors: int = 0
    """What gloo's callers send."""
    preambles: int = 0
    """Of gloo's frames: one in front of each piece of a tensor, and two without, which say that its
    sender and its receiver are ready."""
    greetings: int = 0
    """What gloo sends on a new connection."""
    others: int = 0
    """On the connections of stores, where ranks and agents meet."""
    repeated: int = 0
    """What TCP sends again."""
    headers: int = 0
    """Of IP and TCP, and all of other protocols."""

    @property
    def all(self) -> int:
        """The bytes of all packets."""
        return sum(vars(self).values())


@dataclass
class _Stream:
    """One direction of a TCP connection, whose bytes are read in their order."""

    next_number: int
    stores: set[bytes]
    """The ends of connections with stores, which a client adds."""
    ends: bytes
    """Addresses and ports of both ends, in any order."""
    greeting: int
    """Bytes of the greeting that are still to come."""
    preamble: bytearray = field(default_factory=bytearray)
    left: int = 0
    """Bytes of a tensor's piece that are still to come."""
    early: dict[int, bytes] = field(default_factory=dict)
    """What has come before an earlier packet, by its number."""

    def take(self, number: int, data: bytes, traffic: Traffic) -> None:
        """Count the bytes of a packet; those that have come before are `repeated`."""
        ahead = (number - self.next_number + 2**31) % 2**32 - 2**31
        if ahead > 0:
            traffic.repeated += len(self.early.get(number, b""))
            self.early[number] = data
            return
        known = min(-ahead, len(data))
        traffic.repeated += known
        data = data[known:]
        self.next_number = (self.next_number + len(data)) % 2**32
        self._count(data, traffic)
        if (later := self.early.pop(self.next_number, None)) is not None:
            self.take(self.next_number, later, traffic)

    def _count(self, data: bytes, traffic: Traffic) -> None:
        if self.greeting == GREETING_BYTES and data[1:5] == _MAGIC:
            self.stores.add(self.ends)
        if self.ends in self.stores:
            traffic.others += len(data)
            return
        view = memoryview(data)
        while view:
            if self.greeting:
                taken = min(self.greeting, len(view))
                self.greeting -= taken
                traffic.greetings += taken
            elif self.left:
                taken = min(self.left, len(view))
                self.left -= taken
                traffic.tensors += taken
            else:
                taken = min(PREAMBLE_BYTES - len(self.preamble), len(view))
                self.preamble += view[:taken]
                traffic.preambles += taken
                if len(self.preamble) == PREAMBLE_BYTES:
                    num_bytes, kind = struct.unpack_from("=QQ", self.preamble)
                    assert kind in (1, 2, 3), f"gloo has no frame of kind {kind}"
                    self.left = num_bytes - PREAMBLE_BYTES
                    self.preamble.clear()
            view = view[taken:]


class Cable:
    """A thread that carries packets from each end to the other."""

    def __init__(self, ends: tuple[int, int], is_counting: bool = True) -> None:
        """Join two ends; `is_counting`: all bytes are gloo's and stores', and are told apart."""
        self.is_cut = False
        """Whether all packets are lost."""
        self.seconds = 0.0
        """How long each packet takes."""
        self.loss = 0.0
        """The share of packets that are lost."""
        self.late = 0.0
        """The share of packets that take 20 ms more, so that later ones arrive before them."""
        self.traffic = Traffic()
        self._ends, self._is_counting = ends, is_counting
        self._streams: dict[bytes, _Stream] = {}
        self._stores: set[bytes] = set()
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0
        self._random = random.Random(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self._thread.start()

    def mend(self) -> None:
        """Make it a cable that loses and delays nothing."""
        self.is_cut, self.seconds, self.loss, self.late = False, 0.0, 0.0, 0.0

    def close(self) -> None:
        """End the thread and close both ends, which removes the devices."""
        self._over.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)
        self.check()

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._carry()
        except Exception as error:
            self._error = error

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for side, end in enumerate(self._ends):
                selector.register(end, selectors.EVENT_READ, side)
            while not self._over.is_set():
                wait = 0.1
                if self._queue:
                    wait = min(wait, max(0.0, self._queue[0][0] - time.monotonic()))
                for key, _ in selector.select(wait):
                    self._read(key.data)
                while self._queue and self._queue[0][0] <= time.monotonic():
                    _, _, side, packet = heapq.heappop(self._queue)
                    os.write(self._ends[side], packet)

    def _read(self, side: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(self._ends[side], 65536)
            except BlockingIOError:
                return
            if self._is_counting:
                self._count(packet)
            if self.is_cut or self._random.random() < self.loss:
                continue
            seconds = self.seconds + 0.02 * (self._random.random() < self.late)
            self._num_packets += 1
            due = time.monotonic() + seconds
            heapq.heappush(self._queue, (due, self._num_packets, 1 - side, packet))

    def _count(self, packet: bytes) -> None:
        ip_bytes = 4 * (packet[0] & 15)
        if packet[0] >> 4 != 4 or packet[9] != 6:  # no TCP over IPv4
            self.traffic.headers += len(packet)
            return
        (number,) = struct.unpack_from("!I", packet, ip_bytes + 4)
        header_bytes = ip_bytes + 4 * (packet[ip_bytes + 12] >> 4)
        flags = packet[ip_bytes + 13]
        self.traffic.headers += header_bytes
        sender = packet[12:16] + packet[ip_bytes : ip_bytes + 2]
        receiver = packet[16:20] + packet[ip_bytes + 2 : ip_bytes + 4]
        key = sender + receiver
        if flags & _SYN:
            ends = b"".join(sorted((sender, receiver)))
            if not flags & _ACK:
                self._stores.discard(ends)
            greeting = 0 if flags & _ACK else GREETING_BYTES
            self._streams[key] = _Stream((number + 1) % 2**32, self._stores, ends, greeting)
        elif len(packet) > header_bytes:
            self._streams[key].take(number, packet[header_bytes:], self.traffic)
