"""Glyphs: what is one identity, what is no glyph, and that verification identities are never trained."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder  # type: ignore[import-untyped]
from fontTools.pens.ttGlyphPen import TTGlyphPen  # type: ignore[import-untyped]
from fontTools.ttLib import TTCollection, TTFont  # type: ignore[import-untyped]
from PIL import Image, ImageDraw, ImageFont

from recipes.insightface.data import InMemoryDataset, VerificationPairs, glyph_datasets
from recipes.insightface.data.glyphs import GlyphSet, find_fonts, matplotlib_fonts, render_glyphs
from tests.recipes.data.shared import best_accuracy

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture(scope="module")
def glyphs() -> GlyphSet:
    return render_glyphs(matplotlib_fonts())


@pytest.fixture(scope="module")
def datasets() -> tuple[InMemoryDataset, VerificationPairs]:
    return glyph_datasets()


def identity_of(glyphs: GlyphSet, character: str) -> int:
    (found,) = [number for number, merged in enumerate(glyphs.characters) if character in merged]
    return found


Box = tuple[int, int, int, int]


def write_font(path: Path, shapes: dict[int, Box], *, missing: Box = (100, 0, 700, 700)) -> Path:
    """A font whose glyphs are rectangles (left, bottom, right, top) in a 1000 unit em; `missing` is its ".notdef"."""
    boxes = {".notdef": missing} | {f"u{code:04X}": box for code, box in shapes.items()}
    outlines = {}
    for name, (left, bottom, right, top) in boxes.items():
        pen = TTGlyphPen(None)
        if right > left:
            pen.moveTo((left, bottom))
            for point in ((left, top), (right, top), (right, bottom)):
                pen.lineTo(point)
            pen.closePath()
        outlines[name] = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(list(boxes))
    builder.setupCharacterMap({code: f"u{code:04X}" for code in shapes})
    builder.setupGlyf(outlines)
    builder.setupHorizontalMetrics({name: (800, box[0]) for name, box in boxes.items()})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Boxes", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(str(path))
    return path


def test_default_fonts_are_text_fonts_only() -> None:
    names = {path.name for path in matplotlib_fonts()}
    assert len(names) == 16
    assert {
        "DejaVuSans.ttf",
        "DejaVuSansMono-BoldOblique.ttf",
        "DejaVuSerif-Italic.ttf",
        "STIXGeneralBolIta.ttf",
    } <= names
    assert not [name for name in names if name.startswith(("cm", "Last", "STIXNon", "STIXSiz")) or "Display" in name]


def test_there_are_about_3000_identities_of_four_images_and_more(glyphs: GlyphSet) -> None:
    counts = [len(images) for images in glyphs.images]
    assert 2700 <= len(counts) <= 3500
    assert 27_000 <= sum(counts) <= 35_000
    assert min(counts) == 4


def test_characters_that_look_alike_in_some_font_are_one_identity(glyphs: GlyphSet) -> None:
    latin_a = identity_of(glyphs, "A")
    assert "\N{CYRILLIC CAPITAL LETTER A}" in glyphs.characters[latin_a]
    assert "\N{GREEK CAPITAL LETTER ALPHA}" in glyphs.characters[latin_a]
    others = [identity_of(glyphs, character) for character in "aBO0ÄΛ"]
    assert latin_a not in others and len(set(others)) == len(others)


def test_no_image_belongs_to_two_identities_or_twice_to_one(glyphs: GlyphSet) -> None:
    every = [image for images in glyphs.images for image in images]
    assert len(set(every)) == len(every)


def test_no_image_is_empty_or_cut_at_the_border(glyphs: GlyphSet) -> None:
    pixels = np.frombuffer(b"".join(b"".join(images) for images in glyphs.images), np.uint8).reshape(-1, 32, 32)
    assert (pixels.max(axis=(1, 2)) > 0).all()
    border = np.concatenate([pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]], axis=1)
    assert border.max() == 0


def test_spaces_controls_and_combining_marks_are_left_out(glyphs: GlyphSet) -> None:
    merged = "".join(glyphs.characters)
    for character in (
        " ",
        "\N{NO-BREAK SPACE}",
        "\N{COMBINING ACUTE ACCENT}",
        "\N{SOFT HYPHEN}",
        "\N{BRAILLE PATTERN DOTS-1}",
    ):
        assert character not in merged


def test_images_are_what_the_font_draws(glyphs: GlyphSet) -> None:
    """An independent drawing of a letter that needs no fitting: the same ink, wherever it stands."""
    font = ImageFont.truetype(str(FONTS / "DejaVuSerif-Bold.ttf"), 24, layout_engine=ImageFont.Layout.BASIC)
    canvas = Image.new("L", (100, 100))
    ImageDraw.Draw(canvas).text((40, 40), "H", fill=255, font=font)
    expected = canvas.crop(canvas.getbbox()).tobytes()
    drawn = [Image.frombytes("L", (32, 32), data) for data in glyphs.images[identity_of(glyphs, "H")]]
    assert expected in [image.crop(image.getbbox()).tobytes() for image in drawn]


def test_the_not_defined_glyph_is_dropped_wherever_it_is_drawn(tmp_path: Path) -> None:
    """Six fonts, each with its own shapes; B is drawn like the missing glyph, C is empty."""
    for number in range(6):
        missing = (100, 0, 700, 400 + 50 * number)
        shapes = {0x42: missing, 0x43: (0, 0, 0, 0), 0x44: (100, 0, 300 + 60 * number, 300)}
        write_font(tmp_path / f"{number}.ttf", shapes, missing=missing)
    found = render_glyphs(find_fonts([tmp_path]))
    assert found.characters == ["D"]
    assert len(found.images[0]) == 6


def test_a_placeholder_shared_by_many_characters_is_no_glyph(tmp_path: Path) -> None:
    for number in range(4):
        shapes = {0x4E00 + code: (100, 0, 400, 200 + 50 * number) for code in range(40)}
        shapes[0x41] = (100, 0, 300 + 80 * number, 500)
        write_font(tmp_path / f"{number}.ttf", shapes)
    assert render_glyphs(find_fonts([tmp_path])).characters == ["A"]


def test_fonts_of_one_design_count_once(tmp_path: Path) -> None:
    # 125 units are 3 whole pixels: the same design with other side bearings.
    for number, shift in enumerate((0, 0, 125)):
        write_font(tmp_path / f"same{number}.ttf", {0x41: (100 + shift, 0, 500 + shift, 500)})
    write_font(tmp_path / "other.ttf", {0x41: (100, 0, 300, 700)})
    (images,) = render_glyphs(find_fonts([tmp_path]), min_images=2).images
    assert len(images) == 2


def test_every_face_of_a_collection_is_used(tmp_path: Path) -> None:
    collection = TTCollection()
    for number in range(4):
        path = write_font(tmp_path / f"{number}.ttf", {0x4E00: (100, 0, 200 + 100 * number, 600)})
        collection.fonts.append(TTFont(str(path)))
        path.rename(path.with_suffix(".part"))
    collection.save(str(tmp_path / "all.ttc"))
    found = render_glyphs(find_fonts([tmp_path]))
    assert found.characters == ["\u4e00"]
    assert len(found.images[0]) == 4


def test_further_fonts_add_identities(tmp_path: Path) -> None:
    for number in range(4):
        write_font(tmp_path / f"{number}.otf", {0x4E00: (100, 0, 200 + 100 * number, 600)})
    mono = sorted(FONTS.glob("DejaVuSansMono*.ttf"))
    plain, _ = glyph_datasets(fonts=mono, default_fonts=False, verification_identities=10, pairs=20)
    more, _ = glyph_datasets(fonts=[*mono, tmp_path], default_fonts=False, verification_identities=10, pairs=20)
    assert plain.num_classes > 500
    assert more.num_classes == plain.num_classes + 1


def test_verification_identities_are_never_trained(datasets: tuple[InMemoryDataset, VerificationPairs]) -> None:
    train, pairs = datasets
    trained = {image.numpy().tobytes() for image in train.__getitems__(range(len(train)))[0]}
    assert not [image for image in pairs.images if image.numpy().tobytes() in trained]


def test_pairs_tell_identities_apart(glyphs: GlyphSet, datasets: tuple[InMemoryDataset, VerificationPairs]) -> None:
    train, pairs = datasets
    owner = {image: number for number, images in enumerate(glyphs.images) for image in images}
    identity = np.array([owner[image.numpy().tobytes()] for image in pairs.images])
    assert np.array_equal(identity[pairs.first] == identity[pairs.second], pairs.same.numpy())
    assert len(pairs) == 6000 and int(pairs.same.sum()) == 3000
    assert bool((pairs.first != pairs.second).all())
    assert len(set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))) == 6000
    assert train.num_classes + 400 == len(glyphs.images)
    assert sorted(set(train.labels(range(len(train))).tolist())) == list(range(train.num_classes))


def test_raw_pixels_verify_about_85_percent(datasets: tuple[InMemoryDataset, VerificationPairs]) -> None:
    _, pairs = datasets
    assert 0.80 <= best_accuracy(pairs.images, pairs.first, pairs.second, pairs.same) <= 0.90


def test_the_same_seed_gives_the_same_data(datasets: tuple[InMemoryDataset, VerificationPairs]) -> None:
    train, pairs = datasets
    again, again_pairs = glyph_datasets()
    assert torch.equal(again.__getitems__(range(len(again)))[0], train.__getitems__(range(len(train)))[0])
    assert torch.equal(again_pairs.images, pairs.images) and torch.equal(again_pairs.second, pairs.second)


def test_another_seed_splits_otherwise() -> None:
    mono = sorted(FONTS.glob("DejaVuSansMono*.ttf"))
    kwargs = {"fonts": mono, "default_fonts": False, "verification_identities": 0.5, "pairs": 20}
    one, other = (glyph_datasets(**kwargs, seed=seed)[0] for seed in (0, 1))  # type: ignore[arg-type]
    names = [[data.class_name(label) for label in range(data.num_classes)] for data in (one, other)]
    assert one.num_classes == other.num_classes and names[0] != names[1]


def test_three_channels_repeat_the_gray_one() -> None:
    mono = sorted(FONTS.glob("DejaVuSansMono*.ttf"))
    train, pairs = glyph_datasets(
        image_shape=(3, 24, 24), fonts=mono, default_fonts=False, verification_identities=0.1, pairs=10
    )
    images, _ = train.__getitems__([5, 0])
    assert images.shape == (2, 3, 24, 24) == (2, *train.image_shape)
    assert torch.equal(images[:, 0], images[:, 2])
    assert pairs.images.shape[1:] == (3, 24, 24)


def test_bad_fonts_and_shapes_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"not a font at all")
    with pytest.raises(ValueError, match="empty"):
        glyph_datasets(fonts=[empty])
    with pytest.raises(ValueError, match=r"broken\.ttf"):
        glyph_datasets(fonts=[broken])
    with pytest.raises(ValueError, match=r"none\.ttf"):
        glyph_datasets(fonts=[tmp_path / "none.ttf"])
    with pytest.raises(ValueError, match="at least one font"):
        glyph_datasets(default_fonts=False)
    with pytest.raises(ValueError, match="square"):
        glyph_datasets(image_shape=(1, 32, 24))
