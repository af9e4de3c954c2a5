"""What a link of ``tests/cluster.py`` really carries: a plain TCP transfer between two hosts."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster import Cluster

_PORT = 19_999
_PIECE = 1 << 20
# Not counted: the part in which the sender still finds out the speed, and empties the bucket of saved-up rate.
_WARM_UP = 0.25


def payload_rate(cluster: Cluster, link: int = 0, *, seconds: float = 1.0, both_ways: bool = False) -> float:
    """Bytes a second that programs on host 0 get through to host 1 on a link; with ``both_ways``, the slower way.

    Args:
        seconds: about as long as this takes.
    """
    count = int(cluster.links[link].mbit * 1e6 / 8 * seconds)
    program = [sys.executable, "-I", "-S", __file__, cluster.address(0, link), str(count), str(int(both_ways))]
    ranks = [1, 1] + [0] * (cluster.hosts - 2)
    printed = cluster.launch(ranks, program, timeout=60 + 10 * seconds)
    return min(float(text) for text in printed if text)


def main(address: str, count: int, both_ways: bool) -> None:
    rank = int(os.environ["RANK"])
    with _meet(rank, address) as peer:
        sender = threading.Thread(target=_send, args=(peer, count))
        if rank == 0 or both_ways:
            sender.start()
        if rank == 1 or both_ways:
            print(_receive(peer, count))
        if sender.ident:
            sender.join()
        # Neither leaves before the other has everything.
        peer.shutdown(socket.SHUT_WR)
        assert not peer.recv(1)


def _meet(rank: int, address: str) -> socket.socket:
    if rank == 0:
        with socket.create_server((address, _PORT)) as server:
            return server.accept()[0]
    for _ in range(100):
        try:
            return socket.create_connection((address, _PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {address}")


def _send(peer: socket.socket, count: int) -> None:
    piece = memoryview(bytes(_PIECE))
    while count:
        count -= peer.send(piece[:count])


def _receive(peer: socket.socket, count: int) -> float:
    """Bytes a second, after the warm-up."""
    buffer = memoryview(bytearray(_PIECE))
    received, first, start = 0, 0, 0.0
    while received < count:
        arrived = peer.recv_into(buffer)
        if not arrived:
            raise EOFError(f"the other end stopped after {received} of {count} bytes")
        received += arrived
        if not start and received >= count * _WARM_UP:
            first, start = received, time.perf_counter()
    return (received - first) / (time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])))
