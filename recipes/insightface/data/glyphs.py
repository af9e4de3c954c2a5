"""The embedded data set: characters drawn in many fonts. One character shape is one identity, one font one image.

The default fonts are the text fonts inside matplotlib, so nothing is downloaded. See docs/data.md for the rules.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fontTools.ttLib import TTCollection, TTFont, TTLibError  # type: ignore[import-untyped]
from PIL import Image, ImageDraw, ImageFont

from recipes.insightface.data.dataset import InMemoryDataset
from recipes.insightface.data.decode import check_image_shape
from recipes.insightface.data.pairs import VerificationPairs, pairs_from_dataset, split_identities

# The other fonts that matplotlib ships are no text fonts: the cm fonts draw other symbols at the places of letters,
# LastResort draws boxes, the Display, NonUni and Siz files hold variants and parts of symbols.
_TEXT_FONTS = re.compile(r"(DejaVu(Sans|SansMono|Serif)(-\w+)?|STIXGeneral\w*)\.ttf")
_FONT_SUFFIXES = (".ttf", ".otf", ".ttc")

# Letters, digits, punctuation, mathematical and currency signs. Left out: spaces, controls and combining marks (no
# shape of their own), modifier letters (smaller copies of letters), pictures, box drawing and Braille.
_CATEGORIES = ("Lu", "Ll", "Lt", "Lo", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc")

_EM_FRACTION = 0.75
_BASELINE_FRACTION = 0.72
_MARGIN_FRACTION = 1 / 32

# A font that draws one picture for more code points than this has a placeholder outside its ".notdef" glyph.
_MOST_SHARED = 32

# Hinting draws a copy of the ".notdef" glyph slightly otherwise (3 % of its ink); real glyphs are 17 % away and more.
_MISSING_DIFFERENCE = 0.1


@dataclass(frozen=True)
class GlyphSet:
    """Rendered identities.

    Attributes:
        characters: per identity, all characters that it merges, ascending.
        images: per identity, its distinct images, each size * size gray bytes, ink 255 on 0.
        size: side of an image in pixels.
    """

    characters: list[str]
    images: list[list[bytes]]
    size: int


@dataclass
class _Face:
    """One font face and its sizes opened so far."""

    path: Path
    index: int
    characters: list[str]
    missing: str
    sizes: dict[int, ImageFont.FreeTypeFont] = field(default_factory=dict)

    def at(self, size: int) -> ImageFont.FreeTypeFont:
        if size not in self.sizes:
            # The basic layout draws the glyph of the code point itself; the other one shapes and is slower.
            self.sizes[size] = ImageFont.truetype(
                str(self.path), size, index=self.index, layout_engine=ImageFont.Layout.BASIC
            )
        return self.sizes[size]


def glyph_datasets(
    *,
    image_shape: tuple[int, int, int] = (1, 32, 32),
    fonts: Sequence[str | Path] = (),
    default_fonts: bool = True,
    min_images: int = 4,
    verification_identities: float = 400,
    pairs: int = 6000,
    seed: int = 0,
) -> tuple[InMemoryDataset, VerificationPairs]:
    """Render the glyphs and split them by identity into a training set and verification pairs.

    Args:
        image_shape: (1 or 3, side, side); three channels repeat the gray one.
        fonts: further font files (.ttf, .otf, .ttc) or folders that are searched for them.
        default_fonts: also use matplotlib's text fonts.
        min_images: distinct images that an identity needs, at least 2.
        verification_identities: identities that are never trained; below 1 a fraction, else a count.
        pairs: verification pairs, half same and half different.
        seed: of the split and of the pairs.

    Raises:
        ValueError: no fonts, an unreadable font, a shape that is not square, or too few identities.
    """
    channels, height, width = check_image_shape(image_shape)
    if height != width:
        raise ValueError(f"expected a square image shape for glyphs, got {image_shape}")
    files = ([*matplotlib_fonts()] if default_fonts else []) + find_fonts(fonts)
    glyphs = render_glyphs(files, size=height, min_images=min_images)
    everything = _as_dataset(glyphs, list(range(len(glyphs.images))), channels)
    train, kept = split_identities(len(glyphs.images), verification_identities, seed=seed)
    labels = everything.labels(range(len(everything))).numpy()
    verification = np.flatnonzero(np.isin(labels, kept))
    held_out = pairs_from_dataset(everything, verification, pairs, seed=seed, name="glyphs")
    return _as_dataset(glyphs, train.tolist(), channels), held_out


def matplotlib_fonts() -> list[Path]:
    """The text fonts in matplotlib's data folder, sorted by name. Raises ValueError when there are none."""
    import matplotlib  # large: only where it is used

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(path for path in folder.glob("*.ttf") if _TEXT_FONTS.fullmatch(path.name))
    if not files:
        raise ValueError(f"{folder}: expected matplotlib's DejaVu and STIX fonts, got none; name fonts of your own")
    return files


def find_fonts(paths: Sequence[str | Path]) -> list[Path]:
    """Font files among the given files and folders (searched recursively, sorted). Raises ValueError for a bad path."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in _FONT_SUFFIXES)
            if not inside:
                raise ValueError(f"{path}: expected {', '.join(_FONT_SUFFIXES)} files in this folder, got none")
            found += inside
        elif path.is_file() and path.suffix.lower() in _FONT_SUFFIXES:
            found.append(path)
        else:
            raise ValueError(f"{path}: expected a {', '.join(_FONT_SUFFIXES)} file or a folder of them")
    return found


def render_glyphs(files: Sequence[Path], *, size: int = 32, min_images: int = 4) -> GlyphSet:
    """Draw every suitable character of every face and group them into identities.

    Characters that share an image, byte for byte, are one identity; so no image belongs to two identities, and fonts
    of one design count once. Identities with fewer than `min_images` distinct images are dropped.

    Raises:
        ValueError: no fonts, an unreadable one, or bad sizes.
    """
    if size < 8 or min_images < 2:
        raise ValueError(f"expected a size of at least 8 and at least 2 images, got {size} and {min_images}")
    if not files:
        raise ValueError("expected at least one font file, got none; leave default_fonts on or name fonts")
    owner: dict[bytes, str] = {}
    parent: dict[str, str] = {}
    for face in list(_faces(files)):  # a broken font is reported before any drawing
        for picture, characters in _draw_face(face, size).items():
            for character in characters:
                parent.setdefault(character, character)
                _join(parent, character, owner.setdefault(picture, character))
    characters_of: dict[str, list[str]] = {}
    for character in sorted(parent):
        characters_of.setdefault(_root(parent, character), []).append(character)
    images_of: dict[str, list[bytes]] = {}
    for picture, character in owner.items():
        images_of.setdefault(_root(parent, character), []).append(picture)
    roots = [root for root in characters_of if len(images_of[root]) >= min_images]
    return GlyphSet(["".join(characters_of[root]) for root in roots], [images_of[root] for root in roots], size)


def _faces(files: Sequence[Path]) -> Iterator[_Face]:
    """Every face in the files, with its suitable characters from the face's own character map."""
    for path in files:
        try:
            if path.suffix.lower() == ".ttc":
                with TTCollection(str(path), lazy=True) as collection:
                    maps = [font.getBestCmap() or {} for font in collection.fonts]
            else:
                with TTFont(str(path), lazy=True) as font:
                    maps = [font.getBestCmap() or {}]
        except (TTLibError, OSError, AssertionError, KeyError) as error:
            raise ValueError(f"{path}: expected a TrueType or OpenType font: {error}") from error
        for index, codes in enumerate(maps):
            characters = [chr(code) for code in sorted(codes) if unicodedata.category(chr(code)) in _CATEGORIES]
            missing = next(chr(code) for code in range(0x10FFFF, 0, -1) if code not in codes)
            yield _Face(path, index, characters, missing)


def _draw_face(face: _Face, size: int) -> dict[bytes, list[str]]:
    """Image -> characters drawn so, without empty images, the "not defined" glyph and other placeholders."""
    drawn: dict[bytes, list[str]] = {}
    canvas = Image.new("L", (2 * size, 2 * size))
    for character in face.characters:
        picture = _draw(face, character, canvas, size)
        if any(picture):
            drawn.setdefault(picture, []).append(character)
    missing = np.frombuffer(_draw(face, face.missing, canvas, size), np.uint8).astype(np.int32)
    nearest = _MISSING_DIFFERENCE * missing.sum()
    return {
        picture: characters
        for picture, characters in drawn.items()
        if len(characters) <= _MOST_SHARED and np.abs(np.frombuffer(picture, np.uint8) - missing).sum() > nearest
    }


def _draw(face: _Face, character: str, canvas: Image.Image, size: int) -> bytes:
    """Draw one character: ink centred from left to right, standing on a fixed baseline, moved or shrunk to fit."""
    margin = max(1, round(size * _MARGIN_FRACTION))
    limit = size - 2 * margin
    points = round(size * _EM_FRACTION)
    font = face.at(points)
    while (extent := _extent(font, character)) > limit and points > 4:
        points = max(4, min(points - 1, points * limit // extent))
        font = face.at(points)
    if extent > limit:
        return bytes(size * size)  # a ligature of a whole phrase: nothing legible would be left of it
    origin = size  # the box of a glyph includes its origin, so that a glyph within the limit fits on every side
    canvas.paste(0, (0, 0, canvas.width, canvas.height))
    ImageDraw.Draw(canvas).text((origin, origin), character, fill=255, font=font, anchor="ls")
    ink = canvas.getbbox()
    if ink is None:
        return bytes(size * size)
    left, top, right, bottom = ink
    window_left = (left + right - size) // 2
    window_top = origin - round(size * _BASELINE_FRACTION)
    # Deep descenders and tall accents leave the baseline rather than being cut.
    window_top = max(min(window_top, top - margin), bottom + margin - size)
    return canvas.crop((window_left, window_top, window_left + size, window_top + size)).tobytes()


def _extent(font: ImageFont.FreeTypeFont, character: str) -> int:
    """The longer side of a glyph's box in pixels."""
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    return int(max(right - left, bottom - top))


def _root(parent: dict[str, str], character: str) -> str:
    """The representative of a character's group, with path halving."""
    while parent[character] != character:
        parent[character] = parent[parent[character]]
        character = parent[character]
    return character


def _join(parent: dict[str, str], one: str, other: str) -> None:
    """Merge two groups; the smaller character represents both, so that the result has no order of arrival."""
    low, high = sorted((_root(parent, one), _root(parent, other)))
    parent[high] = low


def _as_dataset(glyphs: GlyphSet, identities: list[int], channels: int) -> InMemoryDataset:
    """The chosen identities, numbered anew from 0 in order."""
    pictures = [picture for identity in identities for picture in glyphs.images[identity]]
    counts = torch.tensor([len(glyphs.images[identity]) for identity in identities], dtype=torch.int64)
    gray = torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8)
    images = gray.view(-1, 1, glyphs.size, glyphs.size).repeat(1, channels, 1, 1)
    labels = torch.repeat_interleave(torch.arange(len(identities)), counts)
    names = [glyphs.characters[identity] for identity in identities]
    return InMemoryDataset(images, labels, num_classes=len(identities), class_names=names)
