"""The watch tells ended, stopped and living processes apart, and passes on what the living say."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridpar.comm import watch as module
from hybridpar.comm.watch import Watch

_OTHER = """
import json, sys, time
from hybridpar.comm.watch import Watch

def exchange(place):
    print(json.dumps(place), flush=True)
    return [place, place]

watch = Watch(1, [0, 1], exchange)
watch.set_status("lane", lambda: {"calls": 3})
watch.set_status("broken", lambda: 1 / 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[Watch, subprocess.Popen[str]]]:
    """This process's watch as rank 0, and a process that is rank 1."""
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as process:
        assert process.stdout is not None
        theirs = json.loads(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        watch = Watch(0, [0, 1], lambda place: [place, theirs])
        try:
            yield watch, process
        finally:
            process.kill()
            watch.close()


def test_a_living_process_says_what_it_does(other: tuple[Watch, subprocess.Popen[str]]) -> None:
    watch, _ = other
    assert watch.gone([0, 1]) == {}
    status = watch.ask([0, 1])[1]
    assert status["lane"] == {"calls": 3}
    assert status["broken"] == "ZeroDivisionError: division by zero"


def test_a_killed_process_is_named_at_once(other: tuple[Watch, subprocess.Popen[str]]) -> None:
    watch, process = other
    process.kill()
    process.wait()
    started = time.monotonic()
    gone = watch.gone([0, 1])
    assert time.monotonic() - started < 1
    assert gone == {1: f"rank 1 (process {process.pid} on {socket.gethostname()}) has ended"}
    assert watch.ask([1]) == {1: None}


def test_a_process_that_stands_still_is_named(other: tuple[Watch, subprocess.Popen[str]]) -> None:
    watch, process = other
    os.kill(process.pid, signal.SIGSTOP)
    assert "has not answered" in watch.gone([1])[1]
    os.kill(process.pid, signal.SIGCONT)
    assert watch.gone([1]) == {}


def _connect(place: dict[str, Any]) -> socket.socket:
    return socket.create_connection(("127.0.0.1", place["port"]), timeout=5)


def test_strangers_learn_nothing_and_do_no_harm() -> None:
    places: list[dict[str, Any]] = []
    watch = Watch(0, [0], lambda place: places.append(place) or [place])  # type: ignore[func-returns-value]
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100 + b"\n", b"0" * 32 + b"\n"):
        with _connect(places[0]) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    with _connect(places[0]) as friend:
        friend.sendall(places[0]["token"].encode() + b"\n")
        assert friend.recv(100) == b"{}\n"
    watch.close()


def test_a_silent_stranger_keeps_nobody_waiting() -> None:
    places: list[dict[str, Any]] = []
    watch = Watch(0, [0], lambda place: places.append(place) or [place])  # type: ignore[func-returns-value]
    with _connect(places[0]), _connect(places[0]) as friend:
        friend.settimeout(1)
        friend.sendall(places[0]["token"].encode() + b"\n")
        assert friend.recv(100) == b"{}\n"
    watch.close()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_watch_that_ends_frees_its_port_and_thread(how: str) -> None:
    places: list[dict[str, Any]] = []
    watch = Watch(0, [0], lambda place: places.append(place) or [place])  # type: ignore[func-returns-value]
    before = [thread for thread in threading.enumerate() if thread.name == "hybridpar-watch"]
    if how == "closed":
        watch.close()
    del watch
    gc.collect()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in before[-1:]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not before[-1].is_alive()
    with pytest.raises(ConnectionRefusedError):
        _connect(places[0])


def test_a_host_that_leads_nowhere_is_told_from_an_ended_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    with socket.socket() as full:  # accepts nothing: its queue is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            place = {"host": "elsewhere", "addresses": ["127.0.0.1"], "port": full.getsockname()[1], "token": "x" * 32}
            watch = Watch(0, [0, 1], lambda own: [own, {**place, "name": "process 7 on b"}])
            assert watch.gone([1]) == {1: "rank 1 (process 7 on b) has not answered for 0.3 s"}
            watch.close()
