"""The recogniser as configured: backbone and head under one of the two ways of cutting them."""

from __future__ import annotations

import torch

import hybridpar as hp
from recipes.common.network import Network, build_network
from recipes.insightface.config import TrainConfig
from recipes.insightface.models import build_model


def build_recognizer(
    config: TrainConfig, num_classes: int, group: hp.Group, device: torch.device, timeline: hp.Timeline | hp.NoTimeline
) -> Network:
    """Build backbone and head as configured, equal on every rank for equal seeds."""
    torch.manual_seed(config.seed)
    backbone = build_model(
        config.model.name,
        image_shape=config.data.image_shape,
        embedding_size=config.model.embedding_size,
        **config.model.options,
    ).to(device)
    if config.model.channels_last:
        backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if config.model.sync_batch_norm:
        backbone = hp.SyncBatchNorm.convert(backbone, group)
    head = build_head(config, num_classes, group if config.mode == "hybrid" else hp.Group.alone(), device)
    return build_network(backbone, head, group, config.gradients, timeline)


def build_head(config: TrainConfig, num_classes: int, group: hp.Group, device: torch.device) -> hp.ShardedClassifier:
    """The head as configured, cut over ``group``."""
    options = config.head
    return hp.ShardedClassifier(
        config.model.embedding_size,
        num_classes,
        margin=options.build_margin(),
        rule=options.rule,
        sampler=options.build_sampler(config.seed),
        optimizer=options.build_policy(
            learning_rate=config.optimizer.learning_rate,
            momentum=config.optimizer.momentum,
            weight_decay=config.optimizer.weight_decay,
            seed=config.seed,
        ),
        dtype=options.torch_dtype,
        seed=config.seed,
        initial_std=options.initial_std,
        state_dir=options.state_dir,
        group=group,
        device=device,
    )
