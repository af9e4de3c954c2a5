"""The presets of the recipe: named sets of defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.common.config import RunConfig
from recipes.insightface.config import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from recipes.insightface.data import FACE_POLICY, GLYPH_POLICY, AugmentPolicy

# Small gray images on CPUs. A margin of 0.3 at scale 32 suits a few thousand classes; 0.5 at 64 is for large sets.
_SMALL_MODEL = ModelConfig(name="convnet", embedding_size=128)
_SMALL_HEAD = HeadConfig(margin_options={"scale": 32.0, "margin": 0.3})
_SMALL_OPTIMIZER = OptimizerConfig(learning_rate=0.2, schedule="cosine", clip=5.0)

# About 2,700 identities and 26,400 images to train on: 103 steps an epoch.
_GLYPHS = TrainConfig(
    data=DataConfig(kind="glyphs", image_size=32, channels=1, verification_identities=400, augment=GLYPH_POLICY),
    model=_SMALL_MODEL,
    head=_SMALL_HEAD,
    optimizer=_SMALL_OPTIMIZER,
    run=RunConfig(out=Path("runs/glyphs"), checkpoint_every=500, evaluate_every=250),
    batch=256,
    epochs=15,
)

# Handwriting varies more than fonts do.
_HANDWRITING = AugmentPolicy(shift=0.08, rotate=15.0, scale=0.2, shear=0.25, contrast=0.1)
_CHARACTERS = TrainConfig(
    data=DataConfig(kind="records", image_size=32, channels=1, augment=_HANDWRITING),
    model=_SMALL_MODEL,
    head=_SMALL_HEAD,
    optimizer=_SMALL_OPTIMIZER,
    run=RunConfig(out=Path("runs/characters"), checkpoint_every=500, evaluate_every=250),
    batch=128,
    epochs=50,
)

# 40 or so people with a few gray photographs each, such as the ORL faces.
_SMALL_FACES = TrainConfig(
    data=DataConfig(
        kind="folders", image_size=32, channels=1, flip=True, augment=FACE_POLICY,
        verification_identities=0.25, verification_pairs=800,
    ),
    model=_SMALL_MODEL,
    head=_SMALL_HEAD,
    optimizer=replace(_SMALL_OPTIMIZER, learning_rate=0.05),
    run=RunConfig(out=Path("runs/small-faces"), checkpoint_every=200, evaluate_every=100),
    batch=64,
    steps=400,
)  # fmt: skip

_RECORDS = TrainConfig(
    data=DataConfig(kind="records", flip=True, augment=FACE_POLICY, workers=2),
    run=RunConfig(out=Path("runs/records")),
    batch=512,
    epochs=20,
)

_FOLDERS = TrainConfig(
    data=DataConfig(kind="folders", flip=True, augment=FACE_POLICY, workers=2, verification_identities=0.1),
    run=RunConfig(out=Path("runs/folders")),
    batch=512,
    epochs=20,
)

_SYNTHETIC = TrainConfig(
    data=DataConfig(kind="synthetic", image_size=32, channels=1),
    model=ModelConfig(name="convnet", embedding_size=128),
    run=RunConfig(out=Path("runs/synthetic"), checkpoint_every=100, evaluate_every=100),
    batch=256,
    steps=200,
)

# 20.5 GB of rows and momentum over all ranks. Their export, in float32, would be as large again.
_TEN_MILLION = TrainConfig(
    data=DataConfig(kind="synthetic", image_size=32, channels=1, identities=10_000_000, shown=2000, cache_mib=0),
    model=ModelConfig(name="convnet", embedding_size=512),
    head=replace(_SMALL_HEAD, dtype="bfloat16", optimizer="sgd", state="bfloat16", sample_rate=0.1),
    optimizer=OptimizerConfig(learning_rate=0.2),
    run=RunConfig(out=Path("runs/ten-million"), checkpoint_every=1000, evaluate_every=1000, keep=1, export=False),
    batch=64,
    steps=200,
)

PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "glyphs": (
        "Characters in the fonts that matplotlib ships: nothing to download, minutes on two CPU cores.",
        _GLYPHS,
    ),
    "characters": ("A record set (--data.path) of small gray characters, on CPUs.", _CHARACTERS),
    "small-faces": ("A few people in folders or a .zip file (--data.path), small and gray, on CPUs.", _SMALL_FACES),
    "records": ("An InsightFace record set (--data.path), 112 x 112 faces, IResNet-50.", _RECORDS),
    "folders": ("One folder of images per identity (--data.path), 112 x 112 faces, IResNet-50.", _FOLDERS),
    "synthetic": ("Any number of identities, images made from the id: for measuring.", _SYNTHETIC),
    "ten-million": (
        "Ten million synthetic identities on one machine of 24 GiB: bfloat16 rows, a tenth of them in each step.",
        _TEN_MILLION,
    ),
}
