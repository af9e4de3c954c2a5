"""RecordIO: MXNet's own bytes, parts, and every kind of damage."""

from __future__ import annotations

import io
import pickle
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.insightface.data.recordio import (
    MAGIC_BYTES,
    RecordFile,
    pack_image_record,
    unpack_image_record,
    write_record,
)

# Written by mxnet 1.9.1: MXRecordIO.write of these three payloads.
MXNET_PAYLOADS = [
    b"abcd" + MAGIC_BYTES + b"efgh" + MAGIC_BYTES + b"ij",
    b"x" + MAGIC_BYTES + b"yz",
    MAGIC_BYTES,
]
MXNET_BYTES = bytes.fromhex(
    "0a23d7ce04000020616263640a23d7ce04000040656667680a23d7ce02000060696a0000"
    "0a23d7ce07000000780a23d7ce797a00"
    "0a23d7ce000000200a23d7ce00000060"
)
# mx.recordio.pack(IRHeader(0, [7.0, 0.25], 9, 0), b"JPEG")
MXNET_TWO_LABELS = bytes.fromhex("0200000000000000090000000000000000000000000000000000e0400000803e4a504547")


def write_all(payloads: list[bytes]) -> bytes:
    out = io.BytesIO()
    for payload in payloads:
        write_record(out, payload)
    return out.getvalue()


def saved(tmp_path: Path, data: bytes) -> RecordFile:
    path = tmp_path / "some.rec"
    path.write_bytes(data)
    return RecordFile(path)


def test_payloads_with_the_magic_are_read_as_mxnet_wrote_them(tmp_path: Path) -> None:
    file = saved(tmp_path, MXNET_BYTES)
    assert list(file) == [(0, MXNET_PAYLOADS[0]), (36, MXNET_PAYLOADS[1]), (52, MXNET_PAYLOADS[2])]
    assert file.read_start(0, 6) == (b"abcd" + MAGIC_BYTES[:2], 18)


def test_payloads_with_the_magic_are_written_as_mxnet_does() -> None:
    assert write_all(MXNET_PAYLOADS) == MXNET_BYTES


def test_image_headers_are_those_of_mxnet() -> None:
    record = unpack_image_record(MXNET_TWO_LABELS, origin="here")
    assert (record.flag, record.labels, record.id, record.content) == (2, (7.0, 0.25), 9, b"JPEG")
    assert pack_image_record((7.0, 0.25), 9, b"JPEG") == MXNET_TWO_LABELS
    single = struct.pack("<IfQQ", 0, 5.0, 3, 0) + b"JPEG"
    assert pack_image_record((5.0,), 3, b"JPEG") == single
    assert unpack_image_record(single, origin="here").labels == (5.0,)


@given(st.lists(st.lists(st.sampled_from([MAGIC_BYTES, b"a", b"bc", b"\x0a", b"\x23\xd7"]), max_size=8), max_size=4))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, pieces: list[list[bytes]]) -> None:
    payloads = [b"".join(piece) for piece in pieces]
    data = write_all(payloads)
    assert len(data) % 4 == 0
    file = saved(tmp_path_factory.mktemp("rec"), data)
    assert [payload for _, payload in file] == payloads


@pytest.mark.parametrize("kept", range(1, len(MXNET_BYTES)))
def test_a_file_cut_anywhere_is_reported_with_its_offset(tmp_path: Path, kept: int) -> None:
    file = saved(tmp_path, MXNET_BYTES[:kept])
    ends = {0: 36, 36: 52, 52: 68}
    for offset, end in ends.items():
        if end <= kept:
            assert file.read(offset) == MXNET_PAYLOADS[list(ends).index(offset)]
            continue
        part = max(
            (start for start in (0, 12, 24, 36, 52, 60) if offset <= start < end and start <= kept), default=offset
        )
        with pytest.raises(ValueError, match=rf"some\.rec.*byte {part}\b.*truncated"):
            file.read(offset)


@pytest.mark.parametrize("offset", [0, 12, 36])
def test_a_wrong_magic_is_reported_with_its_offset(tmp_path: Path, offset: int) -> None:
    data = bytearray(MXNET_BYTES)
    data[offset] ^= 1
    with pytest.raises(
        ValueError, match=rf"some\.rec: byte {offset}: expected the record magic 0xced7230a, got 0xced7230b"
    ):
        list(saved(tmp_path, bytes(data)))


@pytest.mark.parametrize(("offset", "flag"), [(0, 2), (0, 3), (0, 7), (12, 0), (12, 1), (24, 4)])
def test_parts_out_of_order_are_reported_with_their_offset(tmp_path: Path, offset: int, flag: int) -> None:
    data = bytearray(MXNET_BYTES)
    (word,) = struct.unpack_from("<I", data, offset + 4)
    struct.pack_into("<I", data, offset + 4, (word & 0x1FFFFFFF) | flag << 29)
    with pytest.raises(ValueError, match=rf"some\.rec: byte {offset}: expected .* got part flag {flag}"):
        list(saved(tmp_path, bytes(data)))


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    data = MAGIC_BYTES + struct.pack("<I", 0x1FFFFFFF) + b"abcd"
    with pytest.raises(
        ValueError, match=r"byte 0: expected a record part up to byte 536870920, but the file has 12 bytes"
    ):
        saved(tmp_path, data).read(0)


@pytest.mark.parametrize("offset", [-4, 68, 10**12])
def test_an_offset_outside_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    with pytest.raises(ValueError, match=f"at byte {offset}"):
        saved(tmp_path, MXNET_BYTES).read(offset)


def test_an_offset_inside_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="byte 8: expected the record magic"):
        saved(tmp_path, MXNET_BYTES).read(8)


def test_short_image_headers_are_named() -> None:
    with pytest.raises(ValueError, match="here: expected an image header of 24 bytes, got 23"):
        unpack_image_record(bytes(23), origin="here")
    with pytest.raises(ValueError, match="here: expected 3 labels"):
        unpack_image_record(struct.pack("<IfQQ", 3, 0.0, 0, 0) + bytes(8), origin="here")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.rec.*No such file"):
        RecordFile(tmp_path / "none.rec")


def test_a_pickled_file_opens_anew_and_threads_share_one(tmp_path: Path) -> None:
    payloads = [bytes([number]) * (1000 + number) for number in range(64)]
    file = saved(tmp_path, write_all(payloads))
    offsets = [offset for offset, _ in file]
    copy = pickle.loads(pickle.dumps(file))  # noqa: S301
    file.close()
    wrong: list[int] = []

    def read_all() -> None:
        for _ in range(20):
            wrong.extend(number for number, offset in enumerate(offsets) if copy.read(offset) != payloads[number])

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    with pytest.raises(ValueError, match="closed"):
        file.read(0)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists descriptors as Linux does")
def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    saved(tmp_path, MXNET_BYTES)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        RecordFile(tmp_path / "some.rec").read(0)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
