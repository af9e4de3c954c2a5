"""InsightFace record sets: the facts of a set that MXNet wrote, exact labels, and sets that are not whole."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.insightface.data import FolderDataset, RecordSetDataset, collate, load_into_memory, write_record_set
from recipes.insightface.data.convert import convert
from recipes.insightface.data.recordio import RecordFile, pack_image_record, unpack_image_record, write_record
from tests.recipes.data.shared import SHARED, needs_shared, png

SHAPE = (1, 8, 8)


def write_set(folder: Path, *, num_classes: int = 3, labels: tuple[int, ...] = (0, 0, 1, 2, 2), **kwargs: bool) -> Path:
    """Image i is of gray value 10 * i."""
    images = [(png(10 * number), label) for number, label in enumerate(labels)]
    write_record_set(folder, images, num_classes=num_classes, image_size=(8, 8), **kwargs)
    return folder


def write_raw(folder: Path, payloads: list[bytes], *, classes: int = 100) -> Path:
    """A set of the given payloads under keys 0, 1, ..."""
    folder.mkdir(exist_ok=True)
    lines, offset = [], 0
    with (folder / "train.rec").open("wb") as file:
        for key, payload in enumerate(payloads):
            lines.append(f"{key}\t{offset}\n")
            offset += write_record(file, payload)
    (folder / "train.idx").write_text("".join(lines))
    (folder / "property").write_text(f"{classes},8,8")
    return folder


@needs_shared
def test_the_set_that_mxnet_wrote_is_read() -> None:
    dataset = RecordSetDataset(SHARED / "omniglot_rec", image_shape=(3, 112, 112))
    assert (dataset.num_classes, len(dataset), dataset.stored_size) == (202, 4040, (112, 112))
    labels = dataset.labels(range(len(dataset))).numpy()
    assert np.array_equal(labels, np.repeat(np.arange(202), 20))
    ranges = dataset.identity_ranges()
    assert np.array_equal(ranges, np.stack([np.arange(0, 4040, 20), np.arange(20, 4060, 20)], axis=1))


@needs_shared
def test_the_set_holds_the_same_characters_as_the_folders() -> None:
    """The record set (JPEG) and the zip of folders (PNG) were made from the same drawings."""
    records = RecordSetDataset(SHARED / "omniglot_rec", image_shape=(1, 28, 28))
    folders = FolderDataset(SHARED / "omniglot_train_folders.zip", image_shape=(1, 28, 28))
    indices = list(range(0, 4040, 101))
    one, labels = records.__getitems__(indices)
    other, other_labels = folders.__getitems__(indices)
    assert torch.equal(labels, other_labels)
    correlations = [
        np.corrcoef(a.flatten(), b.flatten())[0, 1] for a, b in zip(one.numpy(), other.numpy(), strict=True)
    ]
    assert min(correlations) > 0.9


@needs_shared
def test_writing_the_images_again_gives_mxnets_bytes(tmp_path: Path) -> None:
    source = SHARED / "omniglot_rec"
    records = [unpack_image_record(payload, origin="x") for _, payload in RecordFile(source / "train.rec")]
    images = [(record.content, int(record.labels[0])) for record in records if record.content]
    assert write_record_set(tmp_path / "copy", images, num_classes=202, image_size=(112, 112)) == 4040
    for name in ("train.rec", "train.idx", "property"):
        assert (tmp_path / "copy" / name).read_bytes().strip() == (source / name).read_bytes().strip()


def test_images_and_labels_come_in_the_order_asked_for(tmp_path: Path) -> None:
    dataset = RecordSetDataset(write_set(tmp_path / "set"), image_shape=SHAPE)
    images, labels = dataset.__getitems__([4, 0, 2, 4])
    assert labels.tolist() == [2, 0, 1, 2] and labels.dtype == torch.int64
    assert images[:, 0, 3, 3].tolist() == [40, 0, 20, 40]
    assert images.shape == (4, 1, 8, 8) and images.dtype == torch.uint8
    with pytest.raises(IndexError, match=r"\[0, 5\)"):
        dataset.__getitems__([5])
    with pytest.raises(IndexError):
        dataset.labels([-1])


def test_channels_and_size_are_as_configured(tmp_path: Path) -> None:
    dataset = RecordSetDataset(write_set(tmp_path / "set"), image_shape=(3, 16, 12))
    images, _ = dataset.__getitems__([3])
    assert images.shape == (1, 3, 16, 12) and images.unique().tolist() == [30]
    memory = load_into_memory(dataset)
    assert torch.equal(memory.__getitems__([3])[0], images) and len(memory) == 5


def test_workers_and_pickled_copies_read_the_same(tmp_path: Path) -> None:
    dataset = RecordSetDataset(write_set(tmp_path / "set", label_file=True), image_shape=SHAPE)
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    expected = dataset.__getitems__(range(5))
    assert torch.equal(copy.__getitems__(range(5))[0], expected[0])
    for method in ("fork", "spawn"):
        loader = DataLoader(dataset, batch_size=5, collate_fn=collate, num_workers=1, multiprocessing_context=method)
        ((images, labels),) = list(loader)
        assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1])


def test_labels_above_2_to_24_need_the_label_file(tmp_path: Path) -> None:
    exact = (7, 2**24, 2**24 + 1, 2**24 + 3, 20_000_000)
    folder = write_set(tmp_path / "set", num_classes=20_000_001, labels=exact)
    dataset = RecordSetDataset(folder, image_shape=SHAPE)
    assert dataset.labels(range(5)).tolist() == list(exact)
    assert dataset.__getitems__([2, 1])[1].tolist() == [2**24 + 1, 2**24]
    (folder / "train.lab.npy").unlink()
    with pytest.raises(ValueError, match=r"16777216.*20000001.*train\.lab\.npy"):
        RecordSetDataset(folder, image_shape=SHAPE)


def test_the_largest_exact_label_is_read_from_float32(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", num_classes=2**24, labels=(0, 2**24 - 2, 2**24 - 1))
    assert not (folder / "train.lab.npy").exists()
    assert RecordSetDataset(folder, image_shape=SHAPE).labels(range(3)).tolist() == [0, 2**24 - 2, 2**24 - 1]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.arange(5, dtype=np.int32), r"int64 \[5\], got int32"),
        (np.arange(4), r"int64 \[5\], got int64 \[4\]"),
        (np.array([0, 0, 1, 2, 1]), r"disagrees with 1 in train\.lab\.npy at 4"),
    ],
)
def test_a_label_file_of_another_set_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:  # type: ignore[type-arg]
    folder = write_set(tmp_path / "set")
    np.save(folder / "train.lab.npy", array)
    with pytest.raises(ValueError, match=message):
        RecordSetDataset(folder, image_shape=SHAPE).labels(range(5))


def test_a_pickled_label_file_is_not_run(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    np.save(folder / "train.lab.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"train\.lab\.npy"):
        RecordSetDataset(folder, image_shape=SHAPE)


@pytest.mark.parametrize(
    ("label", "message"), [(100.0, r"\[0, 100\).*got 100"), (-1.0, "-1"), (2.5, "2.5"), (float("nan"), "nan")]
)
def test_labels_that_are_no_identity_are_named_with_their_place(tmp_path: Path, label: float, message: str) -> None:
    good, bad = (pack_image_record((value,), 0, png(1)) for value in (3.0, label))
    dataset = RecordSetDataset(write_raw(tmp_path / "set", [good, bad]), image_shape=SHAPE)
    offset = 8 + len(good) + -len(good) % 4
    with pytest.raises(ValueError, match=rf"train\.rec: record at byte {offset}: .*{message}"):
        dataset.__getitems__([0, 1])


def test_a_set_without_identity_records_has_images_only(tmp_path: Path) -> None:
    payloads = [pack_image_record((float(label),), label, png(label)) for label in (5, 6, 7)]
    dataset = RecordSetDataset(write_raw(tmp_path / "set", payloads), image_shape=SHAPE)
    assert dataset.labels([0, 1, 2]).tolist() == [5, 6, 7]
    assert dataset.identity_ranges().shape == (0, 2)


def test_images_with_several_labels_use_the_first(tmp_path: Path) -> None:
    payloads = [pack_image_record((float(label), 0.5), label, png(label)) for label in (5, 6)]
    dataset = RecordSetDataset(write_raw(tmp_path / "set", payloads), image_shape=SHAPE)
    images, labels = dataset.__getitems__([1, 0])
    assert labels.tolist() == [6, 5] and images[:, 0, 0, 0].tolist() == [6, 5]


def test_a_header_record_without_identity_records_is_understood(tmp_path: Path) -> None:
    payloads = [pack_image_record((3.0, 3.0), 0, b"")]
    payloads += [pack_image_record((float(label),), label, png(label)) for label in (5, 6)]
    assert len(RecordSetDataset(write_raw(tmp_path / "set", payloads), image_shape=SHAPE)) == 2


def test_a_truncated_record_file_is_reported_with_the_offset(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    data = (folder / "train.rec").read_bytes()
    offset = int((folder / "train.idx").read_text().splitlines()[4].split()[1])
    (folder / "train.rec").write_bytes(data[: offset + 40])
    with pytest.raises(ValueError, match=r"train\.rec.*byte \d+.*truncated"):
        RecordSetDataset(folder, image_shape=SHAPE)


def test_a_damaged_image_is_reported_with_the_offset(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    offset = int((folder / "train.idx").read_text().splitlines()[2].split()[1])
    data = bytearray((folder / "train.rec").read_bytes())
    data[offset + 34] ^= 0xFF  # inside the PNG signature
    (folder / "train.rec").write_bytes(bytes(data))
    dataset = RecordSetDataset(folder, image_shape=SHAPE)
    with pytest.raises(ValueError, match=rf"train\.rec: record at byte {offset}: expected a whole JPEG or PNG"):
        dataset.__getitems__([0, 1])


def test_a_truncated_index_is_reported(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    lines = (folder / "train.idx").read_text().splitlines(keepends=True)
    (folder / "train.idx").write_text("".join(lines[:4]))
    with pytest.raises(ValueError, match=r"images end before key 6, but in train\.idx they end before key 4"):
        RecordSetDataset(folder, image_shape=SHAPE)
    (folder / "train.idx").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(ValueError, match="key 2 is missing"):
        RecordSetDataset(folder, image_shape=SHAPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("0\t0\nx\t40\n", "line 2"),
        ("0\t0\n1 40 7\n2\n", "line 2"),
        ("0\t0\n1\t4", "byte 4"),
        ("0\t0\n0\t40\n", "key 0 is listed twice"),
        ("0\t0\n1\t99999999\n", "byte 99999999"),
    ],
)
def test_a_corrupt_index_is_reported(tmp_path: Path, text: str, message: str) -> None:
    folder = write_set(tmp_path / "set")
    (folder / "train.idx").write_text(text)
    with pytest.raises(ValueError, match=message):
        RecordSetDataset(folder, image_shape=SHAPE)


@pytest.mark.parametrize("text", ["", "3,8", "3,8,8,8", "a,8,8", "0,8,8", "-3,8,8"])
def test_a_corrupt_property_file_is_reported(tmp_path: Path, text: str) -> None:
    folder = write_set(tmp_path / "set")
    (folder / "property").write_text(text)
    with pytest.raises(ValueError, match=r"property: expected 'identities,height,width'"):
        RecordSetDataset(folder, image_shape=SHAPE)


@pytest.mark.parametrize("name", ["train.rec", "train.idx", "property"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_set(tmp_path / "set")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        RecordSetDataset(folder, image_shape=SHAPE)


def test_overlapping_identity_ranges_are_reported(tmp_path: Path) -> None:
    payloads = [pack_image_record((3.0, 5.0), 0, b"")]
    payloads += [pack_image_record((float(label),), label, png(label)) for label in (0, 1)]
    payloads += [pack_image_record((1.0, 3.0), 3, b""), pack_image_record((2.0, 3.0), 4, b"")]
    dataset = RecordSetDataset(write_raw(tmp_path / "set", payloads), image_shape=SHAPE)
    with pytest.raises(ValueError, match=r"cover images 1 \.\. 2"):
        dataset.identity_ranges()


def test_the_writer_refuses_labels_out_of_order_and_leaves_nothing(tmp_path: Path) -> None:
    for labels, message in (((1, 0), "got 0 as image 1"), ((0, 3), "got 3 as image 1"), ((), "at least one image")):
        with pytest.raises(ValueError, match=message):
            write_set(tmp_path / "set", labels=labels)
        assert list((tmp_path / "set").iterdir()) == []
    write_set(tmp_path / "set")
    with pytest.raises(ValueError, match=r"found train\.rec"):
        write_set(tmp_path / "set")


def test_the_written_header_has_flag_2_and_the_ranges(tmp_path: Path) -> None:
    data = (write_set(tmp_path / "set") / "train.rec").read_bytes()
    assert struct.unpack_from("<IIIfQQff", data) == (0xCED7230A, 32, 2, 0.0, 0, 0, 6.0, 9.0)


def test_convert_turns_folders_into_a_record_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "faces.zip", "w") as archive:
        for person, values in (("ann", (10, 20)), ("bob", (30,))):
            for value in values:
                archive.writestr(f"{person}/{value}.png", png(value, size=(6, 5), mode="RGB"))
    convert(tmp_path / "faces.zip", tmp_path / "plain")
    convert(tmp_path / "faces.zip", tmp_path / "resized", side=8, channels=1, label_file=True)
    assert "3 images of 2 identities" in capsys.readouterr().out
    assert (tmp_path / "plain" / "property").read_text() == "2,5,6"
    assert (tmp_path / "resized" / "property").read_text() == "2,8,8"
    for name in ("plain", "resized"):
        images, labels = RecordSetDataset(tmp_path / name, image_shape=SHAPE).__getitems__([0, 1, 2])
        assert labels.tolist() == [0, 0, 1] and images[:, 0, 0, 0].tolist() == [10, 20, 30]


def test_convert_refuses_images_of_several_sizes(tmp_path: Path) -> None:
    (tmp_path / "in" / "ann").mkdir(parents=True)
    (tmp_path / "in" / "ann" / "1.png").write_bytes(png(1))
    (tmp_path / "in" / "ann" / "2.png").write_bytes(png(1, size=(9, 8)))
    with pytest.raises(ValueError, match=r"ann/2\.png: expected 8 x 8.*got 8 x 9; --side"):
        convert(tmp_path / "in", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
