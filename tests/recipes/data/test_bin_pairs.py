"""`.bin` pair files: real ones load, hostile ones do not run; and lists of pairs."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.insightface.data import load_bin, load_pair_list, write_bin
from recipes.insightface.data.restricted_pickle import PlainArray, load_plain
from tests.recipes.data.shared import SHARED, best_accuracy, needs_shared, png

SHAPE = (1, 8, 8)
IMAGES = [png(value) for value in (10, 20, 30, 40)]
SAME = [True, False]

# pickle.dumps(([b'ab', 'c\xe9'], [True, False, 0]), 0 | 2) as Python 2.7 writes them: str is bytes there.
PYTHON2_PROTOCOL_0 = b"((lp1\nS'ab'\np2\naS'c\\xe9'\np3\na(lp4\nI01\naI00\naI0\natp5\n."
PYTHON2_PROTOCOL_2 = b"\x80\x02]q\x01(U\x02abq\x02U\x02c\xe9q\x03e]q\x04(\x88\x89K\x00e\x86q\x05."


class Runs:
    """Pickles to a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@needs_shared
def test_a_real_file_loads() -> None:
    pairs = load_bin(SHARED / "omniglot_rec" / "omni.bin", image_shape=(1, 112, 112))
    assert (len(pairs), int(pairs.same.sum()), pairs.name) == (1200, 600, "omni")
    assert pairs.images.shape == (2400, 1, 112, 112)
    assert pairs.first.tolist() == list(range(0, 2400, 2)) and pairs.second.tolist() == list(range(1, 2400, 2))
    accuracy = best_accuracy(pairs.images.float() / 127.5 - 1, pairs.first, pairs.second, pairs.same)
    assert 0.57 <= accuracy <= 0.63


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("form", ["plain", "lists", "numpy", "numpy columns"])
def test_every_protocol_and_common_form_loads(tmp_path: Path, protocol: int, form: str) -> None:
    content: Any = {
        "plain": (IMAGES, SAME),
        "lists": [IMAGES, [1, 0]],
        "numpy": ([np.frombuffer(image, np.uint8) for image in IMAGES], np.array(SAME)),
        "numpy columns": ([np.frombuffer(image, np.uint8)[:, None] for image in IMAGES], [np.bool_(x) for x in SAME]),
    }[form]
    path = tmp_path / "some.bin"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    pairs = load_bin(path, image_shape=SHAPE)
    assert pairs.images[:, 0, 0, 0].tolist() == [10, 20, 30, 40]
    assert pairs.same.tolist() == SAME


@pytest.mark.parametrize("data", [PYTHON2_PROTOCOL_0, PYTHON2_PROTOCOL_2])
def test_python_2_strings_are_bytes(data: bytes) -> None:
    images, same = load_plain(data, origin="here")
    assert images == [b"ab", b"c\xe9"] and list(same) == [True, False, 0]


def test_what_is_written_is_read_by_pickle_and_by_us(tmp_path: Path) -> None:
    path = tmp_path / "some.bin"
    write_bin(path, IMAGES, SAME)
    assert pickle.loads(path.read_bytes()) == (IMAGES, SAME)  # noqa: S301
    pairs = load_bin(path, image_shape=(3, 4, 4))
    assert pairs.images.shape == (4, 3, 4, 4) and pairs.first.tolist() == [0, 2]
    with pytest.raises(ValueError, match="two images per pair"):
        write_bin(path, IMAGES[:3], SAME)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (os.system, "system"),
        (eval, "eval"),
        (exec, "exec"),
        (getattr, "getattr"),
        (subprocess.Popen, "Popen"),
        (np.load, "load"),
        (__import__, "__import__"),
        (Path, "Path"),
        (io.open, "open"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("place", ["whole", "image", "same", "in a tuple"])
def test_a_hostile_file_runs_nothing(tmp_path: Path, function: Any, named: str, protocol: int, place: str) -> None:
    proof = tmp_path / "executed"
    call = Runs(function, f"__import__('os').system('touch {proof}')" if function in (eval, exec) else f"touch {proof}")
    content: Any = {
        "whole": call,
        "image": ([*IMAGES[:3], call], SAME),
        "same": (IMAGES, [True, call]),
        "in a tuple": (IMAGES, SAME, (1, (2, call))),
    }[place]
    path = tmp_path / "hostile.bin"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=r"hostile\.bin: refused to load") as raised:
        load_bin(path, image_shape=SHAPE)
    # Older protocols write the module under its Python 2 name.
    assert re.search(rf"\.{named}: ", str(raised.value))
    assert not proof.exists()


def test_a_hostile_reduce_inside_numpys_is_refused(tmp_path: Path) -> None:
    """numpy's own names are allowed, but what they are given is not."""
    proof = tmp_path / "executed"
    evil = b"cposix\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR"
    for data in (
        b"cnumpy.core.multiarray\n_reconstruct\n(" + evil + b"(I0\ntS'b'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I1\nt" + evil + b"I00\nS'x'\ntb.",
        b"cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(" + evil + b"tRS'x'\ntR.",
        b"cnumpy\ndtype\n(cbuiltins\neval\ntR.",
    ):
        with pytest.raises(ValueError, match=r"refused to load (posix\.system|builtins\.eval)"):
            load_plain(data, origin="here")
    assert not proof.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cnumpy\nndarray\n(I5\ntR.",  # the array class itself cannot be called
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy\ndtype\n(S'f8'\ntR.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"c_codecs\nencode\n}(V__class__\nI1\nu\x86b.",
        b"c_codecs\nencode\n}V__call__\nI1\nsb.",
        b"cnumpy.core.multiarray\n_reconstruct\n(I1\n(I0\ntS'b'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I9\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS'x'\ntb.",
        b"\x80\x04\x97.",  # a buffer from outside
        b"\x80\x02Pid\n.",  # an object from outside
        b"\x82\x01.",  # the extension registry
        b"",
        b"\x80",
        b"garbage",
        pickle.dumps((IMAGES, SAME))[:-30],
    ],
)
def test_damaged_and_odd_pickles_are_reported(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"here: "):
        load_plain(data, origin="here")


def test_an_array_without_its_state_is_empty() -> None:
    made = load_plain(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR.", origin="here")
    assert isinstance(made, PlainArray) and len(made.values) == 0


def test_a_refused_file_leaves_the_reader_as_it_was() -> None:
    """State set on an allowed name must not stay for the next file."""
    with pytest.raises(ValueError, match="here"):
        load_plain(b"c_codecs\nencode\nN}V__doc__\nI1\ns\x86b.", origin="here")
    assert load_plain(pickle.dumps([b"\xff\x00"], 2), origin="here") == [b"\xff\x00"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, r"expected \(images, same or not\), got dict"),
        ((IMAGES,), r"expected \(images, same or not\)"),
        ((IMAGES[:3], SAME), "3 images and 2 pairs"),
        (([], []), "0 images and 0 pairs"),
        ((IMAGES, [True, 2]), "pair 1: expected same or not"),
        ((IMAGES, [True, "no"]), "pair 1: expected same or not"),
        (([*IMAGES[:3], 7], SAME), "image 3: expected the bytes"),
        (([*IMAGES[:3], b"no picture"], SAME), "image 3: expected a whole JPEG or PNG"),
        ((7, SAME), "expected a list of images"),
    ],
)
def test_other_structures_are_reported(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf"some\.bin.*{message}"):
        load_bin(path, image_shape=SHAPE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.bin: expected a readable \.bin file"):
        load_bin(tmp_path / "none.bin")


def test_a_list_of_pairs_loads(tmp_path: Path) -> None:
    for value in (10, 20, 30):
        (tmp_path / f"image {value}.png").write_bytes(png(value))
        (tmp_path / f"{value}.png").write_bytes(png(value))
    spaces = tmp_path / "spaces.txt"
    spaces.write_text("# first second same\n10.png 20.png 0\n\n30.png   10.png 1\n")
    tabs = tmp_path / "tabs.txt"
    tabs.write_text("image 10.png\timage 20.png\t0\nimage 30.png\timage 10.png\t1\n")
    for path in (spaces, tabs):
        pairs = load_pair_list(path, tmp_path, image_shape=SHAPE)
        assert len(pairs.images) == 3
        assert pairs.images[pairs.first, 0, 0, 0].tolist() == [10, 30]
        assert pairs.images[pairs.second, 0, 0, 0].tolist() == [20, 10]
        assert pairs.same.tolist() == [False, True] and pairs.first.dtype == torch.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one pair"),
        ("a.png b.png\n", "line 1: expected 'first second 0|1'"),
        ("a.png b.png 1\na.png b.png yes\n", "line 2"),
        ("a.png c.png 1\n", r"c\.png: expected a readable file"),
        ("a.png b.png 1\n", r"b\.png: expected a whole JPEG or PNG"),
    ],
)
def test_bad_lists_of_pairs_are_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_pair_list(tmp_path / "list.txt", tmp_path, image_shape=SHAPE)
