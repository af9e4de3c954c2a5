"""The watch tells ended, stopped and living processes apart, and passes on what the living say."""

from __future__ import annotations

import errno
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

from hybridpar.comm.lanes import watch as module
from hybridpar.comm.lanes.attendance import Attendance
from hybridpar.comm.lanes.watch import Watch

_OTHER = """
import json, sys, time
from hybridpar.comm.lanes.watch import Watch

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


def test_others_are_asked_also_while_the_interpreter_goes_down(
    other: tuple[Watch, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives no threads then, and a lane that is closed at the very end may still have to name somebody."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(module.ThreadPoolExecutor, "submit", refuse)
    assert other[0].survey([0, 1])[1].answer["lane"] == {"calls": 3}


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


@pytest.mark.parametrize("hint", [None, "127.0.1.1", "localhost", "::1", "own-name"])
def test_other_hosts_are_never_sent_to_loopback(hint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc/hosts says that the host's own name is 127.0.1.1: they would ask themselves."""

    def resolved(name: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        own = [("127.0.1.1", 0), ("::1", 0, 0, 0), ("::ffff:127.0.1.1", 0, 0, 0)]
        found = own if name in (socket.gethostname(), "localhost", "own-name") else [(name, 0)]
        return [(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, 1, 6, "", address) for address in found]

    monkeypatch.setattr(module.socket, "getaddrinfo", resolved)
    assert module._own_addresses(hint) == []


def test_what_remains_of_the_hosts_addresses_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("127.0.1.1", "10.9.8.7")]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)
    assert module._own_addresses(None) == ["10.9.8.7"]


def _place(**changes: Any) -> dict[str, Any]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    place = {"host": "elsewhere", "addresses": ["127.0.0.1"], "port": port, "token": "x" * 32, "name": "process 7 on b"}
    return place | changes


def test_a_rank_that_nobody_can_ask_is_not_called_gone() -> None:
    watch = Watch(0, [0, 1], lambda own: [own, _place(addresses=[])])
    started = time.monotonic()
    assert watch.gone([1]) == watch.ended([1]) == {}
    assert watch.ask([1]) == {1: None}
    attendance = Attendance(watch, "lane", [0, 1])
    attendance.begin()
    assert attendance.lost() == ""
    assert attendance.blame("timed out") == "timed out", "nothing is known of whether rank 1 came"
    assert time.monotonic() - started < 1
    watch.close()


@pytest.mark.parametrize("order", [["refuses", "silent"], ["silent", "refuses"]])
def test_a_rank_has_ended_only_if_no_address_of_it_is_left(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.3)
    failures = {"refuses": ConnectionRefusedError(errno.ECONNREFUSED, ""), "silent": TimeoutError("no way")}

    def converse(address: str, *_: Any) -> Any:
        raise failures[address]

    monkeypatch.setattr(module, "_converse", converse)
    watch = Watch(0, [0, 1, 2], lambda own: [own, _place(addresses=order), _place(addresses=["refuses"] * 2)])
    assert list(watch.gone([1, 2])) == [1, 2]
    assert watch.ended([1, 2]) == {2: "rank 2 (process 7 on b) has ended"}
    assert "has not answered" in watch.gone([1])[1]
    watch.close()


def test_a_process_that_stands_still_has_not_ended(other: tuple[Watch, subprocess.Popen[str]]) -> None:
    watch, process = other
    os.kill(process.pid, signal.SIGSTOP)
    assert watch.ended([1]) == {}
    process.kill()
    process.wait()
    assert list(watch.ended([1])) == [1]


_HOST = """
import errno, gc, os, resource, socket, sys, threading, time
from hybridpar.comm.lanes.watch import Watch

places = {}
watch = Watch(0, [0, 1], lambda place: (places.update(place=place), [place, place])[1])
asker = Watch(1, [0, 1], lambda place: [places["place"], place])
assert asker.gone([0]) == {}, asker.gone([0])
"""


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", _HOST + program], cwd=Path.cwd(), check=True, timeout=60)


def test_it_answers_again_after_a_moment_without_file_descriptors() -> None:
    _run("""
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError as error:
    assert error.errno == errno.EMFILE
os.close(taken.pop())
with socket.socket() as stranger:  # takes the last one: accept() has none for the other end
    stranger.connect(("127.0.0.1", places["place"]["port"]))
    time.sleep(0.5)
    for number in taken:
        os.close(number)
assert asker.gone([0]) == {}, asker.gone([0])
""")


@pytest.mark.parametrize("how", ["sys.exit()", "del watch; gc.collect(); os._exit(0)", "watch.close(); os._exit(0)"])
def test_a_forked_child_that_ends_leaves_its_parents_watch_alone(how: str) -> None:
    _run(f"""
process = os.fork()
if process == 0:
    {how}
assert os.waitpid(process, 0)[1] == 0
time.sleep(0.2)
assert asker.gone([0]) == {{}}, asker.gone([0])
""")
