"""MicroBatches: which micro-batch brought the bad value, with one sync for all of them."""

import math
import pickle
import weakref

import pytest
import torch
from helpers.devices import parameter_with
from torch import nn

import gradstat


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def backward(model: nn.Module, bad: float | None = None) -> None:
    """Runs a micro-batch; with ``bad``, one element of its input has that value."""
    inputs = torch.randn(5, 3)
    if bad is not None:
        inputs[2, 1] = bad
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_micro_batch_that_brought_it_is_named(backend: str) -> None:
    model = make_model()
    micro_batches = gradstat.MicroBatches(model, backend=backend)
    for number in range(5):
        backward(model)
        if number == 1:
            model[2].bias.grad[1] = math.inf
        if number == 3:
            model[0].weight.grad[2, 1] = model[0].weight.grad[3, 0] = math.nan
            model[2].weight.grad[0, 3] = -math.inf
        micro_batches.check()
    report = micro_batches.result()
    assert not report.ok
    assert report.micro_batches == len(report.reports) == 5
    # Micro-batch by micro-batch, worst first.
    assert list(report.nonfinite_since.items()) == [("2.bias", 1), ("0.weight", 3), ("2.weight", 3)]
    assert [len(one.nonfinite) for one in report.reports] == [0, 1, 1, 3, 3]
    assert report.final is report.reports[-1]
    assert report.final["0.weight"].nan_count == 2


def test_the_reports_are_of_the_accumulated_gradients() -> None:
    model = make_model()
    micro_batches, alone = gradstat.MicroBatches(model), []
    for _ in range(3):
        backward(model)
        micro_batches.check()
        alone.append(gradstat.check(model).to_numpy())
    report = micro_batches.result()
    assert report.ok
    assert report.nonfinite_since == {}
    report.raise_if_nonfinite()
    assert all((one.to_numpy() == expected).all() for one, expected in zip(report.reports, alone, strict=True))
    told = "gradstat: 3 micro-batches, all finite after each\nafter the last micro-batch:\ngradstat: 4 gradients of"
    assert str(report).startswith(told)
    assert repr(report) == "AccumulationReport(3 micro-batches, ok)"


def test_a_step_starts_over_behind_its_result_and_when_it_is_given_up() -> None:
    model = make_model()
    micro_batches = gradstat.MicroBatches(model.parameters())  # a generator is kept
    for bad, since in (((None, math.nan, None), {f"param{i}": 1 for i in range(4)}), ((None,), {})):
        model.zero_grad()
        for value in bad:
            backward(model, value)
            micro_batches.check()
        assert micro_batches.result().nonfinite_since == since
    nothing = pytest.raises(RuntimeError, match=r"no micro-batch was checked.*call check\(\) after each backward\(\)")
    with nothing:
        micro_batches.result()
    micro_batches.check()
    micro_batches.reset()
    with nothing:
        micro_batches.result()
    with micro_batches as entered:
        assert entered is micro_batches
        micro_batches.check()
    with nothing:
        micro_batches.result()


def test_micro_batches_without_any_gradient_are_not_ok() -> None:
    micro_batches = gradstat.MicroBatches(make_model())
    micro_batches.check()
    report = micro_batches.result()
    assert not report
    assert repr(report) == "AccumulationReport(1 micro-batch, nothing checked)"
    assert "but no gradient" in str(report)
    with pytest.raises(gradstat.NonFiniteGradientError, match="no gradient to check: none of 4 parameters has one"):
        report.raise_if_nonfinite()


def test_a_gradient_may_appear_late_and_be_freed_and_a_check_that_fails_leaves_the_others() -> None:
    model = make_model()
    micro_batches = gradstat.MicroBatches(model)
    model[0](torch.randn(2, 3)).sum().backward()
    micro_batches.check()
    backward(model)
    model[2].weight.grad[0, 0] = math.nan
    gone = weakref.ref(model[2].weight.grad)
    micro_batches.check()
    model[2].weight.grad = None
    assert gone() is None  # gradients are not kept alive
    micro_batches.check()
    model.extra = nn.Parameter(torch.zeros(2, device="meta"))
    model.extra.grad = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match=r"'extra'.*meta"):
        micro_batches.check()
    report = micro_batches.result()
    assert [one.missing for one in report.reports] == [("2.weight", "2.bias"), (), ("2.weight",)]
    assert report.nonfinite_since == {"2.weight": 1}
    assert not report.ok
    assert report.final.ok


def test_error_and_text_tell_who_when_and_where_also_from_a_pickle() -> None:
    """Four micro-batches over nine parameters, of which the i-th goes bad after micro-batch i % 4."""
    named = [(f"p{i}", parameter_with(torch.ones(2, 3))) for i in range(9)]
    micro_batches = gradstat.MicroBatches(named)
    for number in range(4):
        for _, parameter in named[number::4]:
            parameter.grad[1, 2] = math.nan
        micro_batches.check()
    report = micro_batches.result()
    with pytest.raises(gradstat.NonFiniteGradientError) as caught:
        report.raise_if_nonfinite()
    assert caught.value.report is report.reports[0]
    head, *lines, more = str(caught.value).splitlines()
    assert head == "NaN or Inf in 9 gradients, first in micro-batch 0 of 4 (counted from 0):"
    where = "1 NaN of 6 elements, first at [1, 2] (shape (2, 3), torch.float32)"
    first = ((0, "p0"), (0, "p4"), (0, "p8"), (1, "p1"), (1, "p5"))
    assert lines == [f"  micro-batch {number}: {name}: {where}" for number, name in first]
    assert more == "  and 4 more"
    text = str(report)
    assert text.startswith(f"gradstat: {head}\n")
    assert text.endswith(f"\nafter the last micro-batch:\n{report.final}")
    assert repr(report) == "AccumulationReport(4 micro-batches, 9 not finite, first in 0)"
    again = pickle.loads(pickle.dumps(report))
    assert (again.nonfinite_since, str(again)) == (report.nonfinite_since, text)
