"""The gradient sizes of two models that everybody trains, computed from their architectures, in forward order."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def resnet50(classes: int = 1000) -> list[Shape]:
    """ResNet-50 (He et al. 2015), as torchvision orders its parameters: stride in the 3 x 3 convolution, no biases."""
    shapes = [*_convolution(3, 64, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [*_convolution(channels, width, 1), *_convolution(width, width, 3)]
            shapes += _convolution(width, 4 * width, 1)
            if block == 0:  # the shortcut changes the number of channels
                shapes += _convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, *_linear(channels, classes)]


def bert_base(vocabulary: int = 30_522) -> list[Shape]:
    """BERT-base, uncased (Devlin et al. 2018), as transformers orders the parameters of its BertModel."""
    width, layers, positions, segments = 768, 12, 512, 2
    shapes: list[Shape] = [(vocabulary, width), (positions, width), (segments, width), *_norm(width)]
    for _ in range(layers):
        for _ in ("query", "key", "value", "output"):
            shapes += _linear(width, width)
        shapes += [*_norm(width), *_linear(width, 4 * width), *_linear(4 * width, width), *_norm(width)]
    return [*shapes, *_linear(width, width)]


MODELS = {"resnet50": resnet50, "bert-base": bert_base}


def _convolution(inputs: int, outputs: int, size: int) -> Iterator[Shape]:
    """With the batch norm that follows it."""
    yield outputs, inputs, size, size
    yield from _norm(outputs)


def _norm(width: int) -> Iterator[Shape]:
    yield (width,)
    yield (width,)


def _linear(inputs: int, outputs: int) -> Iterator[Shape]:
    yield outputs, inputs
    yield (outputs,)
