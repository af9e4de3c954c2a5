"""Folders and zip files of images, the split by identity, and the pairs that are drawn."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from recipes.insightface.data import FolderDataset, InMemoryDataset, VerificationPairs, collate, folder_datasets
from recipes.insightface.data.pairs import draw_pairs, split_identities
from recipes.insightface.data.sources import open_source
from tests.recipes.data.shared import SHARED, needs_shared, png

SHAPE = (1, 8, 8)


def write_tree(root: Path, tree: dict[str, bytes]) -> Path:
    for name, data in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_zip(path: Path, tree: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in tree.items():
            archive.writestr(name, data)
    return path


TREE = {
    "bob/1.png": png(30),
    "ann/2.png": png(20),
    "ann/10.jpg": png(10),
    "ann/notes.txt": b"no image",
    "zoe/deep/1.png": png(40, mode="RGB"),
    ".hidden/1.png": b"broken",
    "bob/.thumb.png": b"broken",
    "README.md": b"no image",
}


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_one_folder_is_one_identity_in_the_order_of_names(tmp_path: Path, kind: str) -> None:
    path = write_tree(tmp_path / "in", TREE) if kind == "folder" else write_zip(tmp_path / "in.zip", TREE)
    dataset = FolderDataset(path, image_shape=SHAPE)
    images, labels = dataset.__getitems__(range(4))
    assert labels.tolist() == [0, 0, 1, 2] and images[:, 0, 0, 0].tolist() == [10, 20, 30, 40]
    assert [dataset.class_name(label) for label in range(3)] == ["ann", "bob", "zoe/deep"]
    assert dataset.labels([3, 0]).tolist() == [2, 0]
    assert dataset.__getitems__([2, 0])[0][:, 0, 0, 0].tolist() == [30, 10]


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_workers_and_pickled_copies_read_the_same(tmp_path: Path, kind: str) -> None:
    path = write_tree(tmp_path / "in", TREE) if kind == "folder" else write_zip(tmp_path / "in.zip", TREE)
    dataset = FolderDataset(path, image_shape=SHAPE)
    expected, _ = dataset.__getitems__(range(4))
    assert torch.equal(pickle.loads(pickle.dumps(dataset)).__getitems__(range(4))[0], expected)  # noqa: S301
    batches = list(DataLoader(dataset, batch_size=1, collate_fn=collate, num_workers=2, multiprocessing_context="fork"))
    assert torch.equal(torch.cat([images for images, _ in batches]), expected)


def test_a_forked_reader_leaves_the_file_position_of_its_parent(tmp_path: Path) -> None:
    """Two processes that share one position would read each other's bytes."""
    large = np.random.default_rng(0).bytes(1 << 20)  # more than a read buffer
    source = open_source(write_zip(tmp_path / "in.zip", TREE | {"zoe/large.png": large}))
    source.read("ann/2.png")
    (opened,) = [
        number
        for number in Path("/proc/self/fd").iterdir()
        if number.is_symlink() and number.readlink() == tmp_path / "in.zip"
    ]
    position = os.lseek(int(opened.name), 0, os.SEEK_CUR)
    child = multiprocessing.get_context("fork").Process(target=source.read, args=("zoe/large.png",))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert os.lseek(int(opened.name), 0, os.SEEK_CUR) == position


@needs_shared
def test_the_face_and_character_archives_load() -> None:
    faces = FolderDataset(SHARED / "orl_faces_23x28.zip", image_shape=(1, 28, 23))
    assert (len(faces), faces.num_classes, faces.class_name(39)) == (400, 40, "s40")
    images, labels = faces.__getitems__(range(400))
    assert torch.equal(labels, torch.arange(40).repeat_interleave(10))
    with zipfile.ZipFile(SHARED / "orl_faces_23x28.zip") as archive, archive.open("s03/04.png") as file:
        assert np.array_equal(images[23, 0].numpy(), np.asarray(Image.open(file)))
    characters = FolderDataset(SHARED / "omniglot_train_folders.zip", image_shape=(1, 32, 32))
    assert (len(characters), characters.num_classes) == (4040, 202)


@needs_shared
def test_faces_split_by_identity() -> None:
    train, pairs = folder_datasets(SHARED / "orl_faces_23x28.zip", image_shape=(1, 28, 23), verification_identities=10)
    assert (train.num_classes, len(train), pairs.name) == (30, 300, "orl_faces_23x28")
    assert sorted(set(train.labels(range(300)).tolist())) == list(range(30))
    # 10 identities of 10 images allow 450 pairs of one identity
    assert len(pairs) == 900 and int(pairs.same.sum()) == 450
    trained = {image.numpy().tobytes() for image in train.__getitems__(range(300))[0]}
    assert not [image for image in pairs.images if image.numpy().tobytes() in trained]


def test_the_split_keeps_verification_identities_out(tmp_path: Path) -> None:
    tree = {f"p{person:02}/{image}.png": png(10 * person + image) for person in range(20) for image in range(4)}
    root = write_tree(tmp_path / "in", tree)
    train, pairs = folder_datasets(root, image_shape=SHAPE, verification_identities=0.25, pairs=40, seed=3)
    assert train.num_classes == 15 and len(train) == 60
    images, labels = train.__getitems__(range(60))
    trained = images[:, 0, 0, 0] // 10
    names = [int(train.class_name(label)[1:]) for label in labels.tolist()]
    assert trained.tolist() == names
    people = pairs.images[:, 0, 0, 0] // 10
    assert not set(people.tolist()) & set(trained.tolist())
    assert torch.equal(people[pairs.first] == people[pairs.second], pairs.same)
    again = folder_datasets(root, image_shape=SHAPE, verification_identities=5, pairs=40, seed=3)[1]
    assert torch.equal(again.images, pairs.images) and torch.equal(again.first, pairs.first)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"README.md": b"x"}, "in: expected one folder of images per identity"),
        ({"ann/1.png": png(1), "bob/notes.txt": b"x"}, "in/bob: expected images"),
        ({"ann/1.png": png(1), "2.png": png(2)}, r"in/2\.png: expected every image inside a folder"),
    ],
)
def test_trees_without_images_are_named(tmp_path: Path, tree: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FolderDataset(write_tree(tmp_path / "in", tree), image_shape=SHAPE)
    with pytest.raises(ValueError, match=message.replace("in/", r"in\.zip/").replace("in:", r"in\.zip:")):
        FolderDataset(write_zip(tmp_path / "in.zip", tree), image_shape=SHAPE)


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected one folder of images per identity"):
        FolderDataset(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"none: expected a folder or a \.zip file, got nothing"):
        FolderDataset(tmp_path / "none")
    (tmp_path / "broken.zip").write_bytes(b"PK not really")
    with pytest.raises(ValueError, match=r"broken\.zip: expected a readable \.zip file"):
        FolderDataset(tmp_path / "broken.zip")
    (tmp_path / "empty" / "ann").mkdir()
    with pytest.raises(ValueError, match="empty/ann: expected images"):
        FolderDataset(tmp_path / "empty")


def test_an_unreadable_image_is_named(tmp_path: Path) -> None:
    whole = png(7, size=(64, 64))
    tree = {"ann/1.png": png(1), "ann/2.png": b"no picture", "ann/3.png": whole[: len(whole) // 2], "ann/4.png": b""}
    for path in (write_tree(tmp_path / "in", tree), write_zip(tmp_path / "in.zip", tree)):
        dataset = FolderDataset(path, image_shape=SHAPE)
        for bad in (1, 2, 3):
            with pytest.raises(ValueError, match=rf"{path.name}/ann/{bad + 1}\.png: expected a whole JPEG or PNG"):
                dataset.__getitems__([0, bad])
    (tmp_path / "in" / "ann" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"ann/1\.png: expected a readable file: No such file"):
        FolderDataset.__getitems__(dataset_of(tmp_path / "in", "ann/1.png"), [0])


def dataset_of(root: Path, missing: str) -> FolderDataset:
    """A set that was listed while the file was still there."""
    (root / missing).write_bytes(png(1))
    dataset = FolderDataset(root, image_shape=SHAPE)
    (root / missing).unlink()
    return dataset


def test_pairs_are_distinct_balanced_and_right_even_when_all_are_used() -> None:
    labels = np.array([4, 1, 4, 9, 1, 1])
    first, second, same = draw_pairs(labels, 1000, seed=0)
    # 1 + 3 pairs of one identity exist, and 11 of two
    assert len(same) == 8 and same.sum() == 4
    assert np.array_equal(labels[first] == labels[second], same)
    found = {(int(a), int(b)) for a, b in zip(first, second, strict=True)}
    assert len(found) == 8 and all(a < b for a, b in found)
    assert {(0, 2), (1, 4), (1, 5), (4, 5)} <= found


def test_every_pair_can_be_drawn() -> None:
    labels = np.repeat(np.arange(4), [5, 1, 3, 2])
    every = {(a, b) for a in range(11) for b in range(a + 1, 11)}
    seen: set[tuple[int, int]] = set()
    for seed in range(60):
        first, second, _ = draw_pairs(labels, 20, seed=seed)
        seen |= {(int(a), int(b)) for a, b in zip(first, second, strict=True)}
    assert seen == every


def test_pairs_of_too_few_images_are_refused() -> None:
    for labels in ([0, 1, 2], [0, 0, 0], [0]):
        with pytest.raises(ValueError, match="two identities and one of two images"):
            draw_pairs(np.array(labels), 10, seed=0)


def test_the_split_is_checked() -> None:
    train, kept = split_identities(100, 0.2, seed=1)
    assert len(kept) == 20 and sorted([*train, *kept]) == list(range(100))
    assert not np.array_equal(kept, split_identities(100, 0.2, seed=2)[1])
    for count, verification in ((100, 99), (100, 1), (100, 0.001), (3, 2)):
        with pytest.raises(ValueError, match="at least 2 identities"):
            split_identities(count, verification, seed=0)
    with pytest.raises(ValueError, match="whole number"):
        split_identities(100, 10.5, seed=0)


def test_in_memory_sets_and_pairs_check_their_parts() -> None:
    images = torch.zeros((2, 1, 4, 4), dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8 images and int64 labels"):
        InMemoryDataset(images.float(), torch.tensor([0, 1]), num_classes=2)
    with pytest.raises(ValueError, match=r"labels in \[0, 2\), got 0 \.\. 2"):
        InMemoryDataset(images, torch.tensor([0, 2]), num_classes=2)
    with pytest.raises(ValueError, match="class names"):
        InMemoryDataset(images, torch.tensor([0, 1]), num_classes=2, class_names=["a"])
    rows = torch.tensor([0])
    with pytest.raises(ValueError, match=r"rows in \[0, 2\)"):
        VerificationPairs(images, rows, rows + 2, torch.tensor([True]), "x")
    with pytest.raises(TypeError, match="bool"):
        VerificationPairs(images, rows, rows + 1, torch.tensor([1]), "x")
