"""Plans and wires as values; and what each wire sends, keeps back and gives, seen on one rank."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridpar.comm.buckets import plan_buckets
from hybridpar.comm.engine import codec as codecs
from hybridpar.comm.engine.codec import Codec, carry_over, make_codec
from hybridpar.comm.engine.largest import largest
from hybridpar.comm.engine.plan import Plan
from hybridpar.comm.engine.wire import Wire
from hybridpar.comm.lanes.lane import AloneLane, Op

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Plan(bucket_bytes=0), ValueError, "bucket_bytes: expected 1 or more, got 0"),
        (lambda: Plan(bucket_bytes=1.5), TypeError, "bucket_bytes: expected an int, got 1.5"),
        (lambda: Plan(tracks=0), ValueError, "tracks: expected 1 to 64, got 0"),
        (lambda: Plan(tracks=True), TypeError, "tracks: expected an int, got True"),
        (lambda: Plan(route="ring"), ValueError, "route: expected one of 'auto', .* got 'ring'"),
        (lambda: Plan(wire=BF16), TypeError, "wire: expected a Wire, got torch.bfloat16"),
        (lambda: Plan(compress_exponents=1), TypeError, "compress_exponents: expected True or False, got 1"),
        (
            lambda: Plan(compress_exponents=True, wire=Wire(FP16)),
            ValueError,
            "compress_exponents: expected a wire of float32 or bfloat16 values, got float16",
        ),
        (lambda: Plan(compress_exponents=True, wire=Wire(top_k=0.1)), ValueError, "got own dtype, the largest 10 %"),
        (lambda: Plan.from_json({"lanes": 2}), ValueError, "got also \\['lanes'\\]"),
        (lambda: Wire(torch.float32), ValueError, "dtype: expected torch.bfloat16, .* got torch.float32"),
        (lambda: Wire(BF16, error_feedback=1), TypeError, "error_feedback: expected True or False, got 1"),
        (lambda: Wire(error_feedback=True), ValueError, "expected a half dtype or top_k with it"),
        (lambda: Wire(top_k=0), ValueError, "top_k: expected a fraction above 0 and up to 1, got 0"),
        (lambda: Wire(top_k=1.5), ValueError, "top_k: expected a fraction above 0"),
        (lambda: Wire(top_k=math.nan), ValueError, "top_k: expected a fraction above 0"),
        (lambda: Wire(top_k=True), TypeError, "top_k: expected a fraction or None, got True"),
        (lambda: Wire.from_json({"dtype": "int8"}), ValueError, "dtype: expected one of .* got 'int8'"),
        (lambda: Wire.from_json({"top": 1}), ValueError, "got also \\['top'\\]"),
    ],
)
def test_what_a_plan_cannot_be_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(), "fitting buckets on fitting tracks, route auto, wire: own dtype"),
        (
            Plan(1536, 3, "hierarchical", Wire(BF16, error_feedback=True)),
            "buckets of 1.5 KiB on 3 tracks, route hierarchical, wire: bfloat16, error feedback",
        ),
        (
            Plan(100, 2, "striped", Wire(FP16, top_k=0.01)),
            "buckets of 100 B on 2 tracks, route striped, wire: float16, the largest 1 % of the values, error feedback",
        ),
        (
            Plan(wire=Wire(BF16), compress_exponents=True),
            "fitting buckets on fitting tracks, route auto, wire: bfloat16, exponents compressed between hosts",
        ),
    ],
)
def test_plans_survive_json_and_say_what_they_are(plan: Plan, words: str) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.describe() == words
    assert len({plan, Plan.from_json(plan.to_json())}) == 1


def test_missing_fields_are_the_defaults() -> None:
    assert Plan.from_json({"tracks": 2}) == Plan(tracks=2)


@pytest.mark.parametrize("wire", [Wire(), Wire(BF16), Wire(FP16, top_k=0.1)])
def test_half_gradients_keep_their_dtype(wire: Wire) -> None:
    assert (wire.dtype_of(BF16), wire.dtype_of(FP16)) == (BF16, FP16)
    for dtype in (torch.float32, torch.float64):
        assert wire.dtype_of(dtype) == (wire.dtype or dtype)


class Recorder(AloneLane):
    """One of four ranks, of which the others send zeros. Keeps what this one sends."""

    size = 4

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, op: Op) -> None:
        self.sent.append(tensor.clone())

    def all_gather(self, outputs: Any, tensor: Tensor) -> None:
        self.sent.append(tensor.clone())


def _codec(
    counts: list[int], wire: Wire, *, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[Codec, Recorder]:
    lane = Recorder()
    (bucket,) = plan_buckets(counts, [dtype] * len(counts), range(len(counts)), 1 << 30)
    return make_codec(bucket, wire, lane, CPU, scale), lane


def _round(codec: Codec, lane: Recorder, tensors: list[Tensor | None], *, commit: bool = True) -> list[Tensor]:
    """What the ranks together get."""
    codec.pack(tensors)
    codec.exchange(lane)
    sums = [torch.empty(count, dtype=codec.bucket.dtype) for count in codec.bucket.counts]
    codec.unpack(sums)
    if commit:
        codec.commit()
    return sums


def _draw(*counts: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for count in counts]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_half_wires_divide_before_they_round_and_multiply_afterwards(dtype: torch.dtype, scale: float) -> None:
    codec, lane = _codec([50, 3], Wire(dtype), scale=scale)
    gradients = _draw(50, 3, seed=1)
    sums = _round(codec, lane, list(gradients))
    expected = (torch.cat(gradients) * (scale / 4)).to(dtype)
    assert lane.sent[0].dtype == dtype and torch.equal(lane.sent[0][:53], expected)
    assert torch.equal(torch.cat(sums), expected.float() * 4)


def test_a_sum_of_large_values_stays_in_range() -> None:
    codec, lane = _codec([1], Wire(FP16))
    codec.pack([torch.tensor([60000.0])])
    # The lane adds up four such messages.
    lane.all_reduce(codec.sums.mul_(4), "sum")
    total = torch.empty(1)
    assert codec.unpack([total]) == 0
    assert total.item() == pytest.approx(240000, rel=2**-10)


@pytest.mark.parametrize("wire", [Wire(), Wire(BF16), Wire(FP16)])
@pytest.mark.parametrize("ranks", [1, 3, 256, 1024, 4096])
def test_flags_are_positive_sums_for_any_number_of_ranks(
    wire: Wire, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added up one by one in the format that travels, which is the worst that a library does."""
    monkeypatch.setattr(Recorder, "size", ranks)
    codec, _ = _codec([2, 2], wire)
    codec.pack([torch.ones(2), None])
    message = codec._message  # type: ignore[attr-defined]
    flags, one = torch.zeros_like(message[4:]), message[4:].clone()
    for _ in range(ranks):
        flags += one
    assert bool(flags.isfinite().all())
    message[4:] = flags
    assert codec.present() == [True, False]
    message[4:] = one  # one rank alone
    assert codec.present() == [True, False]


@pytest.mark.parametrize(("dtype", "wire_dtype"), [(torch.float32, BF16), (torch.float32, FP16), (torch.float64, BF16)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_with_error_feedback_all_that_was_sent_is_all_there_was(
    dtype: torch.dtype, wire_dtype: torch.dtype, scale: float
) -> None:
    """Up to one rounding, which is still kept."""
    codec, lane = _codec([40, 7], Wire(wire_dtype, error_feedback=True), dtype=dtype, scale=scale)
    total, sent = torch.zeros(47, dtype=torch.float64), torch.zeros(47, dtype=torch.float64)
    largest = 0.0
    for number in range(100):
        gradients = _draw(40, 7, seed=number, dtype=dtype)
        total += torch.cat(gradients).double() * scale
        _round(codec, lane, list(gradients))
        sent += lane.sent[-1][:47].double() * 4
        largest = max(largest, float(lane.sent[-1][:47].abs().max()) * 4)
    rounding = {BF16: 2**-8, FP16: 2**-11}[wire_dtype] * largest
    assert float((total - sent).abs().max()) <= rounding
    assert codec.residual is not None
    torch.testing.assert_close(sent + 4 * codec.residual.double(), total, rtol=0, atol=1e-5)
    plain, lane = _codec([40, 7], Wire(wire_dtype), dtype=dtype, scale=scale)
    for number in range(100):
        _round(plain, lane, list(_draw(40, 7, seed=number, dtype=dtype)))
    without = torch.stack([message[:47].double() * 4 for message in lane.sent]).sum(0)
    assert float((total - without).abs().max()) > rounding / 4


def test_small_gradients_arrive_in_the_end() -> None:
    """Every one of them alone would be rounded to zero, or down."""
    codec, lane = _codec([1], Wire(FP16, error_feedback=True))
    given = torch.tensor([1e-8 * 4])
    arrived = sum(float(_round(codec, lane, [given])[0]) for _ in range(1000))
    assert arrived == pytest.approx(4e-5, rel=0.01)
    assert float(_round(*_codec([1], Wire(FP16)), [given])[0]) == 0.0


def _largest(values: Tensor, count: int) -> Tensor:
    """All but the ``count`` values of largest magnitude become zero; independent of torch."""
    array = values.double().numpy().copy()
    array[np.argsort(-np.abs(array), kind="stable")[count:]] = 0.0
    return torch.from_numpy(array)


@pytest.mark.parametrize("wire_dtype", [None, BF16, FP16])
@pytest.mark.parametrize("fraction", [1e-9, 0.01, 0.5, 1.0])
def test_top_k_sends_the_largest_of_each_tensor_and_small_tensors_whole(
    wire_dtype: torch.dtype | None, fraction: float
) -> None:
    counts = [2000, 30, codecs.DENSE_BELOW, 1]
    codec, lane = _codec(counts, Wire(wire_dtype, top_k=fraction), scale=0.5)
    gradients = _draw(*counts, seed=1)
    sums = _round(codec, lane, list(gradients))
    for gradient, found, count in zip(gradients, sums, counts, strict=True):
        k = max(1, math.ceil(fraction * count)) if count >= codecs.DENSE_BELOW else count
        expected = _largest(gradient * 0.5, k).float().to(wire_dtype or torch.float32).float()
        assert torch.equal(found, expected)
    values = sum(max(1, math.ceil(fraction * count)) for count in (2000, codecs.DENSE_BELOW))
    size = 4 if wire_dtype is None else 2
    assert codec.nbytes <= values * (size + 4) + 31 * size + 4 + 3 * 8


@pytest.mark.parametrize("count", [1, 65, 700, 20_000])
@pytest.mark.parametrize("shape", ["normal", "equal", "sorted", "few", "periodic", "nan", "infinite"])
def test_the_largest_of_many_are_those_that_sorting_finds(shape: str, count: int) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).abs()
    if shape == "equal":
        values.fill_(2.0)
    elif shape == "sorted":
        values = values.sort().values
    elif shape == "few":  # the sample does not see them
        values = torch.zeros(100_000)
        values[1:200:2] = 1.0
    elif shape == "periodic":
        values[:: 100_000 // (1 << 14)] += 100.0
    elif shape in ("nan", "infinite"):
        values[3:60] = torch.nan if shape == "nan" else torch.inf
    found = largest(values, count)
    assert len(set(found.tolist())) == count
    expected = np.sort(np.where(values.isnan(), np.inf, values.numpy()))[::-1][:count]
    assert np.array_equal(np.sort(np.where(values[found].isnan(), np.inf, values[found].numpy()))[::-1], expected)


@pytest.mark.parametrize("wire_dtype", [None, BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
def test_what_top_k_does_not_send_now_it_sends_later(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> None:
    codec, lane = _codec([1100, 5], Wire(wire_dtype, top_k=0.1), dtype=dtype)
    total, arrived = torch.zeros(1105, dtype=torch.float64), torch.zeros(1105, dtype=torch.float64)
    for number in range(50):
        gradients = _draw(1100, 5, seed=number, dtype=dtype)
        total += torch.cat(gradients).double()
        _round(codec, lane, list(gradients))
        arrived += codec.sums.double()
    assert codec.residual is not None
    torch.testing.assert_close(arrived + codec.residual.double(), total, rtol=0, atol=1e-4)
    # A value waits only as long as others are larger.
    assert float(codec.residual.abs().max()) < 20
    zeros: list[Tensor | None] = [torch.zeros(1100, dtype=dtype), torch.zeros(5, dtype=dtype)]
    for _ in range(12):
        _round(codec, lane, zeros)
        arrived += codec.sums.double()
    torch.testing.assert_close(arrived, total, rtol=0, atol=1e-4 if wire_dtype is None and dtype != BF16 else 0.02)


@pytest.mark.parametrize("wire", [Wire(BF16, error_feedback=True), Wire(top_k=0.1), Wire(FP16, top_k=0.1)])
def test_an_absent_tensor_sends_nothing_and_keeps_its_residual(wire: Wire) -> None:
    counts = [1200, 1300, 4]
    codec, lane = _codec(counts, wire)
    _round(codec, lane, list(_draw(*counts, seed=1)))
    assert codec.residual is not None
    before = codec.residual.clone()
    first, middle, _ = _round(codec, lane, [*_draw(1200, seed=2), None, *_draw(4, seed=3)])
    assert codec.present() == [True, False, True]
    assert not middle.any() and first.any()
    assert torch.equal(codec.residual[1200:2500], before[1200:2500])
    assert not torch.equal(codec.residual[:1200], before[:1200])


@pytest.mark.parametrize(
    ("wire", "bad"),
    [
        (Wire(BF16, error_feedback=True), math.nan),
        (Wire(BF16, error_feedback=True), -math.inf),
        (Wire(FP16, error_feedback=True), 1e38),  # finite, but no float16
        (Wire(top_k=0.01), math.nan),  # more of them than travel at once
        (Wire(top_k=0.01), math.inf),
        (Wire(FP16, top_k=0.5), 1e38),
    ],
)
def test_what_is_not_finite_never_stays(wire: Wire, bad: float) -> None:
    codec, lane = _codec([1500], wire)
    (gradient,) = _draw(1500, seed=1)
    gradient[7:70] = bad
    (total,) = _round(codec, lane, [gradient])
    assert not bool(total.isfinite().all())
    assert codec.residual is not None and bool((codec.residual.abs() < 10).all())
    (total,) = _round(codec, lane, [torch.zeros(1500)])
    assert bool(total.isfinite().all())


@pytest.mark.parametrize("wire", [Wire(BF16, error_feedback=True), Wire(top_k=0.01)])
def test_a_round_that_is_not_committed_leaves_no_trace(wire: Wire) -> None:
    one, lane_of_one = _codec([1500], wire)
    two, lane_of_two = _codec([1500], wire)
    for number in range(3):
        _round(two, lane_of_two, list(_draw(1500, seed=100 + number)), commit=False)
        found = [
            _round(codec, lane, list(_draw(1500, seed=number)))
            for codec, lane in ((one, lane_of_one), (two, lane_of_two))
        ]
        assert torch.equal(found[0][0], found[1][0])


def test_residuals_go_on_in_other_buckets_and_units() -> None:
    counts = [1500, 3, 2000]
    old, lane = _codec(counts, Wire(BF16, error_feedback=True), scale=0.5)
    _round(old, lane, list(_draw(*counts, seed=1)))
    assert old.residual is not None
    kept = old.residual * 4  # the message is divided by the number of ranks
    new, _ = _codec(counts, Wire(top_k=0.1), scale=0.5)
    carry_over([old], [new])
    assert new.residual is not None and torch.equal(new.residual, kept)
    buckets = plan_buckets(counts, [torch.float32] * 3, [2, 0, 1], 8000)
    parts = [make_codec(bucket, Wire(FP16, error_feedback=True), Recorder(), CPU, 0.5) for bucket in buckets]
    carry_over([new], parts)
    found = torch.cat([part.residual for part in parts if part.residual is not None]) * 4
    assert torch.equal(found, torch.cat([kept[1503:], kept[:1503]]))
    whole, _ = _codec(counts, Wire())
    carry_over(parts, [whole])
    assert whole.residual is None


def test_a_bucket_of_small_tensors_needs_no_indices() -> None:
    codec, lane = _codec([3, 4], Wire(BF16, top_k=0.1))
    _round(codec, lane, list(_draw(3, 4, seed=1)))
    assert lane.sent[0].dtype == BF16 and len(lane.sent[0]) == 9
    assert codec.residual is not None  # top_k comes with error feedback
    assert _codec([3, 4], Wire(top_k=0.1))[0].residual is None
