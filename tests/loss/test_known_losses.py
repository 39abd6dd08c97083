"""Do the known losses divide by the documented number, and is their reduction right?"""

from __future__ import annotations

from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from ms_accum.loss.known_losses import divisor_of, loss_reduction, why_not_additive

pytestmark = pytest.mark.usefixtures("eager")
ROWS, CLASSES, CUT = 9, 5, 3
CLASS_WEIGHTS = Tensor(np.array([0.2, 1.0, 3.0, 0.5, 2.0]), ms.float32)


def scores(rng, more=()):
    return rng.randn(ROWS, CLASSES, *more).astype(np.float32)


def classes(rng, more=()):
    """Return labels; only in the first rows they are ignored."""
    labels = rng.randint(0, CLASSES, (ROWS, *more)).astype(np.int32)
    labels[:2] = -100
    return labels


def shares(rng):
    raw = rng.rand(ROWS, CLASSES).astype(np.float32)
    return raw / raw.sum(1, keepdims=True)


def numbers(rng):
    return rng.randn(ROWS, CLASSES).astype(np.float32)


def bits(rng):
    return (rng.rand(ROWS, CLASSES) < 0.5).astype(np.float32)


def signs(rng):
    return bits(rng) * 2 - 1


def log_scores(rng):
    return np.log(shares(rng))


def unit_numbers(rng):
    return rng.rand(ROWS, CLASSES).astype(np.float32)


def early_bits(rng):
    """Return bits that are 1 in the first rows and rarely in others, so that the two parts differ."""
    raw = (rng.rand(ROWS, CLASSES) < 0.1).astype(np.float32)
    raw[:CUT] = 1
    return raw


def function(loss, **options):
    return partial(loss, **options)


weighted, both = {"weight": CLASS_WEIGHTS}, {"weight": CLASS_WEIGHTS, "ignore_index": 2}
# (loss, output, labels)
KNOWN = {
    **{
        f"{name} cross entropy {how}": (make(**options), outputs, labels)
        for name, make in (
            ("nn", nn.CrossEntropyLoss),
            ("mint", mint.nn.CrossEntropyLoss),
            ("ops", partial(function, ops.cross_entropy)),
        )
        for how, options, outputs, labels in (
            ("plain", {}, scores, classes),
            ("weighted", weighted, scores, classes),
            ("ignoring", both, scores, lambda rng: abs(classes(rng)) % CLASSES),
            ("of pixels", {}, partial(scores, more=(4,)), partial(classes, more=(4,))),
            ("of shares", {}, scores, shares),
        )
        if (name, how) != ("mint", "of pixels")  # of which there is no kernel
    },
    **{
        f"{name} nll {how}": (make(**options), log_scores, classes)
        for name, make in (("nn", nn.NLLLoss), ("mint", mint.nn.NLLLoss), ("ops", partial(function, ops.nll_loss)))
        for how, options in (("plain", {}), ("weighted", weighted))
    },
    "nn l1": (nn.L1Loss(), numbers, numbers),
    "nn mse": (nn.MSELoss(), numbers, numbers),
    "nn bce with logits": (nn.BCEWithLogitsLoss(), numbers, bits),
    "mint bce with logits": (mint.nn.BCEWithLogitsLoss(), numbers, bits),
    "nn smooth l1": (nn.SmoothL1Loss(reduction="mean"), numbers, numbers),
    "mint smooth l1": (mint.nn.SmoothL1Loss(), numbers, numbers),
    "nn bce": (nn.BCELoss(reduction="mean"), unit_numbers, bits),
    "mint bce": (mint.nn.BCELoss(), unit_numbers, bits),
    "mae": (nn.MAELoss(), numbers, numbers),
    "huber": (nn.HuberLoss(), numbers, numbers),
    "kl mean": (nn.KLDivLoss(reduction="mean"), log_scores, shares),
    "kl batchmean": (nn.KLDivLoss(reduction="batchmean"), log_scores, shares),
    "hinge": (nn.HingeEmbeddingLoss(), numbers, signs),
    "poisson": (nn.PoissonNLLLoss(), numbers, unit_numbers),
    "focal": (nn.FocalLoss(), scores, lambda rng: rng.randint(0, CLASSES, (ROWS, 1)).astype(np.int32)),
    "focal of shares": (nn.FocalLoss(), scores, lambda rng: np.eye(CLASSES, dtype=np.int32)[abs(classes(rng)) % 5]),
    "softmax": (
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        scores,
        lambda rng: abs(classes(rng)) % CLASSES,
    ),
    "multi label soft margin": (nn.MultiLabelSoftMarginLoss(), numbers, bits),
    "multi margin": (nn.MultiMarginLoss(), numbers, lambda rng: rng.randint(0, CLASSES, ROWS).astype(np.int64)),
    "ops mse": (ops.mse_loss, numbers, numbers),
    "ops l1": (ops.l1_loss, numbers, numbers),
    "ops smooth l1": (partial(ops.smooth_l1_loss, reduction="mean"), numbers, numbers),
    "mint function bce with logits": (mint.nn.functional.binary_cross_entropy_with_logits, numbers, bits),
}
# MindSpore's CPU has no kernel of the first; the second computes the same.
NOT_ON_CPU = {
    "mint l1": (mint.nn.L1Loss(), nn.L1Loss()),
    "mint mse": (mint.nn.MSELoss(), nn.MSELoss()),
    "mint function mse": (mint.nn.functional.mse_loss, ops.mse_loss),
    "mint kl": (mint.nn.KLDivLoss(), nn.KLDivLoss(reduction="mean")),
    "mint function cross entropy": (
        partial(mint.nn.functional.cross_entropy, weight=CLASS_WEIGHTS),
        partial(ops.cross_entropy, weight=CLASS_WEIGHTS),
    ),
    "soft margin": (nn.SoftMarginLoss(), nn.MSELoss()),
}


def miss_of(loss_fn, output, labels, count):
    """Return the relative error of the weighted mean of the losses of two parts."""

    def compute(output, labels):
        return loss_fn(output, labels)

    # PyNative mode has no kernel for this one.
    loss = ms.jit(compute) if isinstance(loss_fn, mint.nn.CrossEntropyLoss) else compute
    parts = [(Tensor(output[rows]), Tensor(labels[rows])) for rows in (slice(None), slice(CUT), slice(CUT, None))]
    total, *losses = [float(loss(*part).asnumpy()) for part in parts]
    return abs(np.average(losses, weights=[count(*part) for part in parts[1:]]) / total - 1)


# Outside graphs MindSpore has no kernel of the others.
OUTSIDE = [name for name in KNOWN if not name.startswith("mint cross entropy")]


@pytest.mark.parametrize("name", OUTSIDE)
def test_weighted_mean_of_parts_equals_the_loss(name, rng):
    loss_fn, output, labels = KNOWN[name]
    assert miss_of(loss_fn, output(rng), labels(rng), divisor_of(loss_fn)) < 1e-5


def test_partial_of_a_cell_has_the_cells_divisor():
    loss_fn, columns = nn.CrossEntropyLoss(ignore_index=0), (Tensor([[0.0]] * 4), Tensor([0, 1, 0, 2], ms.int32))
    assert divisor_of(partial(partial(loss_fn)))(*columns) == divisor_of(loss_fn)(*columns) == 2
    assert divisor_of(partial(loss_fn)) is not None and divisor_of(partial(loss_fn, 1)) is None


@pytest.mark.parametrize(("loss_fn", "like"), NOT_ON_CPU.values(), ids=NOT_ON_CPU)
@pytest.mark.parametrize("labels", [classes, numbers])
def test_losses_without_cpu_kernel_have_the_same_divisor(loss_fn, like, labels, rng):
    columns = (Tensor(scores(rng)), Tensor(labels(rng)))
    assert divisor_of(loss_fn)(*columns) == divisor_of(like)(*columns)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(4, np.float32), "must get integer labels, or a distribution"),
        ([1, 255, 0], "labels >= 0 and < 5, the number of class weights, but got 255"),
    ],
)
def test_invalid_labels_are_rejected(labels, message):
    with pytest.raises(ValueError, match=message):
        divisor_of(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS))(Tensor(np.zeros((4, 5))), Tensor(labels))


def by_rows(data, label):
    return len(data)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.MSELoss(), mint.nn.SmoothL1Loss(), nn.BCEWithLogitsLoss(), ops.mse_loss],
    ids=["nn mse", "mint smooth l1", "nn bce", "ops mse"],
)
def test_sequences_are_weighted_by_their_elements(loss_fn, rng):
    """Two micro-batches of sequences of different lengths equal one row of all elements."""
    parts = [(rng.rand(4, length).astype(np.float32), rng.rand(4, length).astype(np.float32)) for length in (3, 17)]
    joined = [Tensor(np.concatenate([column.ravel() for column in columns])) for columns in zip(*parts)]
    parts = [tuple(map(Tensor, part)) for part in parts]
    losses, expected = [float(loss_fn(*part).asnumpy()) for part in parts], float(loss_fn(*joined).asnumpy())
    weights = [divisor_of(loss_fn)(*part) for part in parts]
    assert np.average(losses, weights=weights) == pytest.approx(expected, rel=1e-5)
    assert np.average(losses) != pytest.approx(expected, rel=1e-3)


def test_batchmean_is_weighted_by_rows_of_any_length(rng):
    loss_fn = nn.KLDivLoss(reduction="batchmean")
    parts = [tuple(Tensor(rng.rand(*shape).astype(np.float32)) for _ in range(2)) for shape in ((4, 3), (2, 17))]
    sums = [float(nn.KLDivLoss(reduction="sum")(*part).asnumpy()) for part in parts]
    losses, weights = (
        [float(loss_fn(*part).asnumpy()) for part in parts],
        [divisor_of(loss_fn)(*part) for part in parts],
    )
    assert weights == [4, 2] and np.average(losses, weights=weights) == pytest.approx(sum(sums) / 6, rel=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "output", "labels"),
    [
        (nn.RMSELoss(), numbers, numbers),
        (nn.DiceLoss(), unit_numbers, early_bits),
        (nn.MultiClassDiceLoss(), shares, bits),
    ],
    ids=["RMSELoss", "DiceLoss", "MultiClassDiceLoss"],
)
def test_losses_that_are_not_additive(loss_fn, output, labels, rng):
    assert why_not_additive(loss_fn) and divisor_of(loss_fn) is None
    assert miss_of(loss_fn, output(rng), labels(rng), by_rows) > 1e-3
    assert why_not_additive(nn.MSELoss()) is None


class Squares(nn.MSELoss):
    """Overrides `construct`, so that it is another loss than its base class."""

    def construct(self, logits, labels):
        return ops.square(logits - labels).sum() / len(labels)


@pytest.mark.parametrize("loss_fn", [None, Squares(), lambda output, label: output.sum(), abs])
def test_divisor_of_unknown_losses_is_none(loss_fn):
    assert divisor_of(loss_fn) is None and why_not_additive(loss_fn) is None


# Whether they average or sum


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
        (nn.CrossEntropyLoss(reduction="none"), "none"),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True), "none"),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), "mean"),
        (mint.nn.BCEWithLogitsLoss(), "mean"),
        (mint.nn.BCEWithLogitsLoss(reduction="sum"), "sum"),
        (abs, None),
        (None, None),
    ],
)
def test_loss_reduction(loss, reduction):
    assert loss_reduction(loss) == reduction
