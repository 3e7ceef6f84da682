"""The cable tells the bytes of tensors from all others, however TCP cuts and repeats them."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

from tests.clusters.cable import Traffic, _Stream

CLIENT = struct.pack("=q", 3)


def frame(kind: int, tensor: bytes = b"") -> bytes:
    return struct.pack("=QQ32x", 48 + len(tensor), kind) + tensor


def stream(first: int, greeting: int = 8) -> _Stream:
    return _Stream(first, set(), b"ends", greeting)


def test_frames_are_told_apart_wherever_packets_end():
    sent = CLIENT + frame(2) + frame(1, bytes(1000)) + frame(3) + frame(1) + frame(1, bytes(7))
    draw = random.Random(0)
    for _ in range(20):
        traffic, read = Traffic(), stream(2**32 - 100)  # TCP's numbers begin again at 0
        cuts = sorted({0, len(sent), *(draw.randrange(len(sent)) for _ in range(9))})
        for low, high in pairwise(cuts):
            read.take((2**32 - 100 + low) % 2**32, sent[low:high], traffic)
        assert traffic == Traffic(tensors=1007, preambles=5 * 48, greetings=8)


def test_what_comes_twice_or_early_counts_once():
    sent = frame(1, bytes(100))
    traffic, read = Traffic(), stream(0, greeting=0)
    read.take(100, sent[100:], traffic)
    assert traffic.tensors == 0
    read.take(0, sent[:60], traffic)
    read.take(0, sent[:60], traffic)
    read.take(40, sent[40:100], traffic)
    assert traffic == Traffic(tensors=100, preambles=48, repeated=80)


def test_a_store_sends_no_tensors():
    traffic, stores = Traffic(), set[bytes]()
    client = _Stream(0, stores, b"ends", 8)
    server = _Stream(0, stores, b"ends", 0)
    client.take(0, b"\0" + struct.pack("=I", 0x3C85F7CE) + b"key", traffic)
    server.take(0, b"value", traffic)
    assert traffic == Traffic(others=13)
