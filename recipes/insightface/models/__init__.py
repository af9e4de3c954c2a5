"""Backbones: images [B, C, H, W] to embeddings [B, D]."""

from __future__ import annotations

from recipes.insightface.models.zoo import MODEL_NAMES, build_model, count_parameters

__all__ = ["MODEL_NAMES", "build_model", "count_parameters"]
