"""Augmentation: a pure function of (seed, epoch, sample), off when empty, and doing what each field says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.common.hashing import bell, hash_counters, uniform
from recipes.insightface.data import FACE_POLICY, GLYPH_POLICY, AugmentPolicy, augment, normalize

EVERYTHING = AugmentPolicy(
    shift=0.1, rotate=20, scale=0.2, shear=0.2, flip=0.5, brightness=0.1, contrast=0.2, noise=0.05, erase=0.5
)


def some_images(count: int, shape: tuple[int, int, int] = (3, 20, 15)) -> Tensor:
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_normalize_maps_to_minus_one_and_one() -> None:
    assert normalize(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]
    with pytest.raises(TypeError, match="uint8"):
        normalize(torch.zeros(3))


def test_the_empty_policy_only_normalises() -> None:
    images = some_images(5)
    assert torch.equal(augment(images, torch.arange(5), seed=1, epoch=2, policy=AugmentPolicy()), normalize(images))


@pytest.mark.parametrize("policy", [EVERYTHING, GLYPH_POLICY, FACE_POLICY])
def test_a_sample_does_not_depend_on_its_batch(policy: AugmentPolicy) -> None:
    images, ids = some_images(67), torch.arange(67) * 1_000_003 + 10**12
    whole = augment(images, ids, seed=3, epoch=4, policy=policy)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(augment(images[order], ids[order], seed=3, epoch=4, policy=policy), whole[order])
    for start, stop in ((0, 1), (1, 4), (4, 67)):
        part = augment(images[start:stop], ids[start:stop], seed=3, epoch=4, policy=policy)
        assert torch.equal(part, whole[start:stop])


def test_seed_epoch_and_sample_each_change_the_result() -> None:
    images = some_images(1).repeat(3, 1, 1, 1)
    base = augment(images, torch.tensor([5, 6, 5]), seed=1, epoch=1, policy=EVERYTHING)
    assert torch.equal(base[0], base[2]) and not torch.equal(base[0], base[1])
    for seed, epoch in ((2, 1), (1, 2)):
        other = augment(images, torch.tensor([5, 6, 5]), seed=seed, epoch=epoch, policy=EVERYTHING)
        assert not torch.equal(other[0], base[0])


def test_the_result_stays_in_range() -> None:
    policy = AugmentPolicy(brightness=1, contrast=2, noise=1)
    out = augment(some_images(8), torch.arange(8), seed=0, epoch=0, policy=policy)
    assert out.dtype == torch.float32 and out.min() == -1 and out.max() == 1


def test_flip_mirrors_half_of_the_samples_exactly() -> None:
    images = some_images(400, (1, 4, 6))
    out = augment(images, torch.arange(400), seed=0, epoch=0, policy=AugmentPolicy(flip=0.5))
    plain = normalize(images)
    kept = ((out - plain).abs().amax((1, 2, 3)) < 1e-5).numpy()
    mirrored = ((out - plain.flip(3)).abs().amax((1, 2, 3)) < 1e-5).numpy()
    assert (kept | mirrored).all()
    assert 160 < mirrored.sum() < 240


def test_moves_match_torch_affine_grid() -> None:
    """One rotation about the centre of a non-square image against torch's grid, at the angle that was drawn."""
    images = some_images(6, (1, 20, 30))
    out = augment(images, torch.arange(6), seed=9, epoch=0, policy=AugmentPolicy(rotate=30))
    for number in range(6):
        angle = np.deg2rad(30) * (2 * float(uniform(9, 0, np.array([[number]]), np.array([[2]]))[0, 0]) - 1)
        cosine, sine, aspect = np.cos(angle), np.sin(angle), 20 / 30
        matrix = torch.tensor([[cosine, -sine * aspect, 0.0], [sine / aspect, cosine, 0.0]], dtype=torch.float32)
        grid = F.affine_grid(matrix[None], [1, 1, 20, 30], align_corners=False)
        expected = F.grid_sample(
            normalize(images[number : number + 1]), grid, padding_mode="border", align_corners=False
        )
        torch.testing.assert_close(out[number : number + 1], expected, atol=1e-4, rtol=0)


def test_rotation_keeps_lengths_in_a_wide_image() -> None:
    """A dot 10 pixels right of the centre stays 10 pixels from it, whatever the shape of the image."""
    images = torch.zeros((20, 1, 41, 61), dtype=torch.uint8)
    images[:, 0, 20, 40] = 255
    out = augment(images, torch.arange(20), seed=2, epoch=0, policy=AugmentPolicy(rotate=90))[:, 0] + 1
    y, x = torch.meshgrid(torch.arange(41.0) - 20, torch.arange(61.0) - 30, indexing="ij")
    mass = out.sum((1, 2))
    radius = ((out * x).sum((1, 2)) / mass).hypot((out * y).sum((1, 2)) / mass)
    assert (radius - 10).abs().max() < 0.3


def test_scale_and_shift_stay_within_their_limits() -> None:
    images = torch.zeros((200, 1, 40, 40), dtype=torch.uint8)
    images[:, :, 10:30, 10:30] = 255
    out = augment(images, torch.arange(200), seed=2, epoch=0, policy=AugmentPolicy(scale=0.25))[:, 0] + 1
    sides = (out.sum((1, 2)) / 2).sqrt()
    assert 15.8 < sides.min() < 17 and 23.5 < sides.max() < 25.2
    moved = augment(images, torch.arange(200), seed=2, epoch=0, policy=AugmentPolicy(shift=0.1))[:, 0] + 1
    x = (moved.sum(1) * (torch.arange(40.0) - 19.5)).sum(1) / moved.sum((1, 2))
    assert 3.5 < x.abs().max() <= 4.01 and x.abs().min() < 0.5


def test_noise_has_the_stated_deviation_and_no_memory() -> None:
    images = torch.full((40, 1, 32, 32), 128, dtype=torch.uint8)
    policy = AugmentPolicy(noise=0.05)
    noise = augment(images, torch.arange(40), seed=0, epoch=0, policy=policy) - normalize(images)
    assert abs(float(noise.std()) - 0.1) < 0.002 and abs(float(noise.mean())) < 0.002
    correlation = np.corrcoef(noise.flatten(1).numpy())
    assert np.abs(correlation - np.eye(40)).max() < 0.15


def test_erase_paints_one_rectangle_on_the_chosen_share() -> None:
    images = torch.full((300, 1, 20, 20), 255, dtype=torch.uint8)
    out = augment(images, torch.arange(300), seed=0, epoch=0, policy=AugmentPolicy(erase=0.3, erase_side=0.5))
    erased = (out == 0)[:, 0]
    touched = erased.flatten(1).any(1)
    assert 60 < int(touched.sum()) < 120
    for mask in erased[touched]:
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns[None, :])
        assert rows.sum() <= 10 and columns.sum() <= 10


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="flip"):
        AugmentPolicy(flip=1.5)
    with pytest.raises(ValueError, match="rotate"):
        AugmentPolicy(rotate=-1)
    with pytest.raises(TypeError, match="int64"):
        augment(some_images(2), torch.zeros(2), seed=0, epoch=0, policy=EVERYTHING)
    with pytest.raises(ValueError, match="sample ids"):
        augment(some_images(2), torch.arange(3), seed=0, epoch=0, policy=EVERYTHING)


def test_hash_mixes_as_splitmix64_does() -> None:
    """The published generator, in Python integers: state += step, output = mix(state)."""

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    step = 0x9E3779B97F4A7C15
    assert mix(1234567 + step) == 6457827717110365317  # the first output for seed 1234567
    for seed, counter in ((0, 0), (1234567, 5), (-3, 2**62)):
        expected = mix(((mix(seed % 2**64) ^ counter) + step) % 2**64)
        assert int(hash_counters(seed, np.array([counter]))[0]) == expected


def test_hash_values_are_uniform_and_bell_shaped() -> None:
    values = uniform(0, np.arange(500)[:, None], np.arange(200)[None, :]).ravel()
    assert np.histogram(values, 20, (0, 1))[0].std() < 3 * np.sqrt(5000)
    assert values.min() >= 0 and values.max() < 1
    shaped = bell(hash_counters(1, np.arange(200_000)))
    assert abs(shaped.mean()) < 0.01 and abs(shaped.std() - 1) < 0.01
    assert abs((np.abs(shaped) < 1).mean() - 0.683) < 0.02
