"""Data sets of the recipe: embedded glyphs, InsightFace record sets, folders, synthetic images, verification pairs."""

from recipes.insightface.data.augment import FACE_POLICY, GLYPH_POLICY, AugmentPolicy, augment, normalize
from recipes.insightface.data.bin_pairs import load_bin, load_pair_list, write_bin
from recipes.insightface.data.dataset import IdentityDataset, InMemoryDataset, collate, load_into_memory
from recipes.insightface.data.folders import FolderDataset, folder_datasets
from recipes.insightface.data.glyphs import glyph_datasets
from recipes.insightface.data.pairs import VerificationPairs
from recipes.insightface.data.record_set import RecordSetDataset, write_record_set
from recipes.insightface.data.synthetic import SyntheticDataset

__all__ = [
    "FACE_POLICY",
    "GLYPH_POLICY",
    "AugmentPolicy",
    "FolderDataset",
    "IdentityDataset",
    "InMemoryDataset",
    "RecordSetDataset",
    "SyntheticDataset",
    "VerificationPairs",
    "augment",
    "collate",
    "folder_datasets",
    "glyph_datasets",
    "load_bin",
    "load_into_memory",
    "load_pair_list",
    "normalize",
    "write_bin",
    "write_record_set",
]
