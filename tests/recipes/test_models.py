"""The backbones against the published networks: parameter counts, depths, feature-map sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recipes.insightface.models import MODEL_NAMES, build_model, count_parameters
from recipes.insightface.models.iresnet import STAGE_DEPTHS, ImprovedUnit, IResNet
from recipes.insightface.models.layers import initialise
from recipes.insightface.models.mobilefacenet import MobileFaceNet

SMALL = ("convnet", "mobilefacenet", "iresnet18")


# In millions, of the published networks for 112 x 112 colour images (IResNet: the public InsightFace models with 512
# elements; MobileFaceNet: the paper's Table 1 counts 0.99 with 128 elements and folded normalisation).
@pytest.mark.parametrize(
    ("name", "embedding_size", "millions", "tolerance"),
    [
        ("iresnet18", 512, 24.03, 0.01),
        ("iresnet34", 512, 34.14, 0.01),
        ("iresnet50", 512, 43.59, 0.01),
        ("iresnet100", 512, 65.15, 0.01),
        ("mobilefacenet", 128, 0.99, 0.02),
        ("mobilefacenet", 512, 1.20, 0.01),
        # By hand: 3 x 3 kernels between 3, 32, 64, 128, 256 channels, three numbers per channel after each, the linear
        # layer from 7 x 7 positions, two numbers per element of the embedding.
        ("convnet", 128, (9 * (3 * 32 + 32 * 64 + 64 * 128 + 128 * 256) + 3 * 480 + 128 * (256 * 49 + 2)) / 1e6, 1e-9),
    ],
)
def test_parameter_counts_are_the_published_ones(
    name: str, embedding_size: int, millions: float, tolerance: float
) -> None:
    with torch.device("meta"):
        model = build_model(name, image_shape=(3, 112, 112), embedding_size=embedding_size)
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=tolerance)


@pytest.mark.parametrize("depth", [18, 34, 50, 100])
def test_iresnet_has_as_many_weight_layers_as_its_name_says(depth: int) -> None:
    with torch.device("meta"):
        model = IResNet(image_shape=(3, 112, 112), embedding_size=512, depth=depth)
    # Shortcut convolutions do not count in the naming of residual networks.
    main = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert sum(not (isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)) for m in main) == depth


def test_iresnet_200_has_the_stages_of_the_public_model() -> None:
    assert STAGE_DEPTHS[200] == (6, 26, 60, 6)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("image_shape", [(1, 32, 32), (1, 28, 28), (3, 112, 112), (1, 28, 23), (3, 8, 8), (2, 64, 48)])
def test_embeddings_have_the_asked_shape_for_any_image_shape(name: str, image_shape: tuple[int, int, int]) -> None:
    model = build_model(name, image_shape=image_shape, embedding_size=24)
    embeddings = model(torch.randn(3, *image_shape))
    assert embeddings.shape == (3, 24)
    assert embeddings.dtype == torch.float32
    assert bool(torch.isfinite(embeddings).all())


@pytest.mark.parametrize(("side", "last"), [(112, 7), (64, 4), (32, 4), (28, 4), (16, 2)])
def test_last_feature_map_has_the_size_of_the_paper_or_keeps_several_positions(side: int, last: int) -> None:
    mobile = MobileFaceNet(image_shape=(1, side, side), embedding_size=8, width=0.25)
    assert mobile.global_depthwise.kernel_size == (last, last)
    residual = IResNet(image_shape=(1, side, side), embedding_size=8, depth=18, width=0.125)
    seen: list[torch.Size] = []
    residual.output_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    residual(torch.randn(2, 1, side, side))
    assert seen[0][2:] == (last, last)


def test_improved_unit_has_the_order_of_the_arcface_paper() -> None:
    unit = ImprovedUnit(4, 8, stride=2)
    expected = [nn.BatchNorm2d, nn.Conv2d, nn.BatchNorm2d, nn.PReLU, nn.Conv2d, nn.BatchNorm2d]
    assert [type(layer) for layer in unit.layers] == expected
    strides = [layer.stride for layer in unit.layers if isinstance(layer, nn.Conv2d)]
    assert strides == [(1, 1), (2, 2)]


def test_iresnet_units_start_as_the_identity() -> None:
    torch.manual_seed(0)
    model = IResNet(image_shape=(1, 32, 32), embedding_size=8, depth=18, width=0.125)
    unit = model.units[1]
    x = torch.randn(2, 8, 16, 16)
    torch.testing.assert_close(unit(x), x)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, image_shape=(1, 32, 32), embedding_size=8)
    (model(torch.randn(4, 1, 32, 32)) * torch.randn(4, 8)).sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_convolutions_start_with_the_variance_of_he_for_a_slope_of_a_quarter() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(64, 256, 3)
    initialise(convolution)
    oracle = torch.empty_like(convolution.weight)
    nn.init.kaiming_normal_(oracle, a=0.25, mode="fan_out", nonlinearity="leaky_relu")
    assert convolution.weight.std().item() == pytest.approx(oracle.std().item(), rel=0.02)


def test_depthwise_convolutions_start_with_the_variance_of_their_own_fan() -> None:
    torch.manual_seed(0)
    model = MobileFaceNet(image_shape=(1, 32, 32), embedding_size=8)
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1 and m.kernel_size == (3, 3)]
    weights = torch.cat([m.weight.flatten() for m in depthwise])
    assert weights.std().item() == pytest.approx(math.sqrt(2 / (1 + 0.25**2) / 9), rel=0.03)


def test_mobilefacenet_width_scales_channels_to_multiples_of_eight() -> None:
    model = MobileFaceNet(image_shape=(1, 32, 32), embedding_size=8, width=0.6)
    channels = {m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)}
    assert all(count % 8 == 0 for count in channels)
    # 0.6 of 64, 128 and 512, to the nearest multiple of 8; inner widths are twice or four times the first two.
    assert {40, 80, 304} <= channels


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_named_model_builds(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, image_shape=(1, 32, 32), embedding_size=128)
    assert count_parameters(model) > 0


def test_same_seed_same_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build_model("convnet", image_shape=(1, 32, 32), embedding_size=8)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_options_reach_the_model() -> None:
    model = build_model("convnet", image_shape=(1, 32, 32), embedding_size=8, channels=(4, 8), width=1.5, dropout=0.25)
    convolutions = [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions == [6, 12]
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet1001"}, "mobilefacenet.*resnet1001"),
        ({"name": "convnet", "depth": 2}, "channels, dropout, width; got depth"),
        ({"name": "iresnet18", "depth": 50}, "got depth"),
        ({"name": "convnet", "image_shape": (32, 32)}, r"\(channels, height, width\), got 2 numbers"),
        ({"name": "convnet", "image_shape": (0, 32, 32)}, "at least one image channel"),
        ({"name": "iresnet18", "image_shape": (1, 32, 7)}, "at least 8 x 8 pixels, got 32 x 7"),
        ({"name": "convnet", "embedding_size": 0}, "positive embedding_size, got 0"),
        ({"name": "convnet", "channels": ()}, "positive channel count"),
        ({"name": "convnet", "width": float("nan")}, "positive, finite width multiplier, got nan"),
        ({"name": "mobilefacenet", "width": 0}, "positive, finite width multiplier, got 0"),
        ({"name": "iresnet18", "width": float("inf")}, "positive, finite width multiplier, got inf"),
    ],
)
def test_impossible_models_are_refused_with_a_reason(arguments: dict[str, object], message: str) -> None:
    complete: dict[str, object] = {"image_shape": (1, 32, 32), "embedding_size": 8, **arguments}
    with pytest.raises(ValueError, match=message):
        build_model(**complete)  # type: ignore[arg-type]


def test_an_unknown_depth_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"\[18, 34, 50, 100, 200\], got 19"):
        IResNet(image_shape=(1, 32, 32), embedding_size=8, depth=19)
