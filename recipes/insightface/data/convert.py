"""Turn a folder (or .zip file) of images, one folder per identity, into an InsightFace record set.

python -m recipes.insightface.data.convert FOLDER OUT
python -m recipes.insightface.data.convert FOLDER OUT --side 112
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from recipes.insightface.data.decode import check_image_shape, decode_image, encode_png, stored_size
from recipes.insightface.data.folders import find_identities
from recipes.insightface.data.record_set import write_record_set
from recipes.insightface.data.sources import FileSource, open_source


def convert(
    folder: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    side: int = 0,
    channels: int = 3,
    label_file: bool = False,
) -> None:
    """Write OUT/train.rec, OUT/train.idx and OUT/property from the images below FOLDER.

    Args:
        folder: a folder or .zip file with one folder of images per identity.
        out: folder to write to; it must not hold a record set yet.
        side: resize every image to this square side and store it as PNG; 0 stores the files as they are.
        channels: 1 or 3; of the resized images.
        label_file: also write the labels as int64 to train.lab.npy.
    """
    source = open_source(folder)
    identities = find_identities(source)
    first = next(iter(identities.values()))[0]
    size = (side, side) if side else stored_size(source.read(first), origin=source.describe(first))
    contents = _resized(source, identities, (channels, side, side)) if side else _as_they_are(source, identities, size)
    count = write_record_set(out, contents, num_classes=len(identities), image_size=size, label_file=label_file)
    print(f"{count} images of {len(identities)} identities written to {out}")


def _resized(
    source: FileSource, identities: dict[str, list[str]], image_shape: tuple[int, int, int]
) -> Iterator[tuple[bytes, int]]:
    check_image_shape(image_shape)
    for label, names in enumerate(identities.values()):
        for name in names:
            yield encode_png(decode_image(source.read(name), image_shape, origin=source.describe(name))), label


def _as_they_are(
    source: FileSource, identities: dict[str, list[str]], size: tuple[int, int]
) -> Iterator[tuple[bytes, int]]:
    for label, names in enumerate(identities.values()):
        for name in names:
            data = source.read(name)
            found = stored_size(data, origin=source.describe(name))
            if found != size:
                raise ValueError(
                    f"{source.describe(name)}: expected {size[0]} x {size[1]} pixels as in the first image, got "
                    f"{found[0]} x {found[1]}; --side resizes all images"
                )
            yield data, label


if __name__ == "__main__":
    tyro.cli(convert)
