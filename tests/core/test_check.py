"""check, check_async, check_tensors and stats: what they accept, what they name, and what they refuse."""

import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.cuda_counts import Counts, busy_device, count
from helpers.devices import parameter_with
from torch import nn

import gradstat
from gradstat._core.host_copy import HostRows
from gradstat._core.measurement import Measurement


def trained(model: nn.Module, features: int = 6) -> nn.Module:
    model(torch.randn(4, features, device=next(model.parameters()).device)).square().sum().backward()
    return model


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)), nn.Linear(5, 2))


NAMES = ("0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias", "3.weight", "3.bias")


def test_every_kind_of_target_gives_the_same_numbers(where: tuple[str, str]) -> None:
    backend, device = where
    model = trained(make_model().to(device))
    model[2][0].weight.grad[1, 2] = math.nan
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    unnamed = torch.optim.SGD([{"params": model[0].parameters()}, {"params": [*model[2:].parameters()]}], lr=0.1)
    positions = tuple(f"param{i}" for i in range(8))
    of_groups = ("group0.0", "group0.1", *(f"group1.{i}" for i in range(6)))
    targets = {
        NAMES: (model, optimizer, model.named_parameters(), dict(model.named_parameters())),
        positions: (model.parameters(),),
        of_groups: (unnamed,),
    }
    norm = nn.utils.get_total_norm([p.grad.nan_to_num() for p in model.parameters()])  # type: ignore[union-attr]
    for names, target in ((names, target) for names, of_names in targets.items() for target in of_names):
        report = gradstat.check(target, backend=backend)
        assert report.names == names
        assert not report.ok
        assert [stats.first_nonfinite for stats in report.nonfinite] == [(1, 2)]
        assert report.nan_count == 1
        assert report.finite_norm == pytest.approx(norm.item())
        assert report.numel == sum(p.numel() for p in model.parameters())
    single = gradstat.check(model[0].weight, backend=backend)
    assert single.names == ("parameter",)
    assert single.total_norm == pytest.approx(model[0].weight.grad.norm().item())


def test_missing_gradients_are_reported_and_frozen_parameters_are_not() -> None:
    for nothing in (nn.ReLU(), []):
        assert str(gradstat.check(nothing)) == "gradstat: no gradient to check"
    model = make_model()
    model[3].weight.requires_grad_(False)
    report = gradstat.check(model)
    assert len(report) == 0
    assert not report.ok
    assert report.missing == tuple(name for name in NAMES if name != "3.weight")
    trained(model)
    model[0].bias.grad = None
    pending = gradstat.check_async(model)
    model[0].weight.grad = None  # after the check, so its report does not list it as missing
    assert pending.result().missing == ("0.bias",)
    with pytest.raises(KeyError, match=r"'0\.bias' has no gradient"):
        pending.result()["0.bias"]
    del model[:]
    assert gradstat.check(model).names == gradstat.check(model).missing == ()


def test_tied_parameters_appear_once_in_a_module_and_twice_in_a_list() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    trained(model, 3)
    assert gradstat.check(model).names == ("0.weight", "0.bias", "1.bias")
    assert len(gradstat.check([model[0].weight, model[1].weight])) == 2


def test_check_tensors_names_any_tensors(device: str) -> None:
    logits, batch = torch.randn(3, 4, device=device), torch.ones(2, device=device)
    logits[2, 1] = -math.inf
    report = gradstat.check_tensors({"logits": logits, "batch": batch})
    assert report.names == ("logits", "batch")
    assert report["logits"].first_nonfinite == (2, 1)
    assert gradstat.check_tensors([logits, batch]).names == ("tensors[0]", "tensors[1]")
    assert gradstat.check_tensors(batch)[0].mean == 1.0
    with pytest.raises(gradstat.NonFiniteGradientError, match="logits: 1 Inf of 12 elements, first at \\[2, 1\\]"):
        report.raise_if_nonfinite()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_need_gradients_are_measured() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    (parameter**3).sum().backward(create_graph=True)
    assert parameter.grad.requires_grad
    assert gradstat.check([parameter]).max_abs == 12.0
    assert gradstat.clip_grad_norm_([parameter], 1.0) > 1
    assert gradstat.check([parameter]).total_norm == pytest.approx(1.0, rel=1e-4)
    parameter.grad = None  # breaks the cycle of parameter and graph


def test_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = torch.ones(9, device=device)
        assert gradstat.check_tensors([x]).total_norm == 3.0
        assert gradstat.clip_grad_norm_([parameter_with(x)], 1.0) == 3.0
        assert x.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*(deprecated|beta state)")  # torch's quantized and compressed tensors
@pytest.mark.parametrize("backend", [None, "native", "reference"])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x.long(), TypeError, r"'w'.*int64.*\.float\(\)"),
        (lambda x: x.bool(), TypeError, r"'w'.*bool"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), TypeError, r"'w'.*quantized.*dequantize"),
        (lambda x: x.to("meta"), ValueError, r"'w'.*meta.*to_empty"),
        (lambda x: x.to_sparse(layout=torch.sparse_csc), ValueError, r"'w'.*sparse_csc.*to_sparse_coo"),
    ],
    ids=["integer", "bool", "quantized", "meta", "compressed"],
)
def test_what_has_no_statistics_is_refused_by_name(
    make: Callable[[torch.Tensor], torch.Tensor], error: type[Exception], message: str, backend: str | None
) -> None:
    gradient = make(torch.ones(3, 3))
    tensors = {"fine": torch.ones(3), "w": gradient}
    with pytest.raises(error, match=message):
        gradstat.check_tensors(tensors, backend=backend)
    if error is not TypeError:
        with pytest.raises(error, match=message):
            gradstat.check([("fine", parameter_with(torch.ones(3))), ("w", parameter_with(gradient))], backend=backend)


LOSS = nn.Linear(2, 1)(torch.ones(2)).sum()


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        *(
            (call, target, TypeError, "expected|neither")
            for call in (gradstat.check, gradstat.MicroBatches)
            for target in (3, None, {"a": 1}, "model")
        ),
        (gradstat.check, [torch.full((2,), math.nan)], ValueError, "check_tensors"),
        (gradstat.check, {"a": torch.ones(2)}, ValueError, "check_tensors"),
        (gradstat.check, LOSS, ValueError, r"not a leaf: it was computed by <SumBackward0.*Pass the model"),
        (gradstat.check, [nn.Parameter(torch.ones(2)), 5], TypeError, "item 1 is neither"),
        (gradstat.check_tensors, 5, TypeError, "expected a tensor, or tensors in a mapping or sequence, got int"),
        (gradstat.check_tensors, {"a": LOSS, "b": [1.0]}, TypeError, r"'b', got an object of type list"),
        (gradstat.stats, [None], TypeError, r"'tensors\[0\]', got None"),
        (gradstat.stats, torch.ones(3), TypeError, r"pass \[tensor\]"),
    ],
)
def test_what_is_nothing_to_check_is_refused(call: Any, given: object, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(given)


def test_rows_of_several_devices_come_in_the_order_of_the_tensors() -> None:
    measured = Measurement([torch.zeros(2, 3), torch.ones(3, 3)], [0, 3, 1, 2, 4], ())
    assert measured.table()[:, 0].tolist() == [0, 1, 1, 0, 1]
    assert HostRows(measured).table()[:, 0].tolist() == [0, 1, 1, 0, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_launches_and_syncs_of_every_call(backend: str) -> None:
    model = trained(make_model().cuda())
    tensors = [parameter.grad for parameter in model.parameters()]
    micro_batches = gradstat.MicroBatches(model, backend=backend)

    def in_micro_batches() -> None:
        micro_batches.reset()
        for _ in range(3):
            micro_batches.check()

    def on_a_busy_device(*calls: Callable[[], object]) -> None:  # else the numbers may have arrived before the sync
        busy_device()
        for call in calls:
            call()

    check, micro_result = partial(gradstat.check, model, backend=backend), micro_batches.result
    assert count(lambda: gradstat.stats(tensors, backend=backend)) == Counts(launches=1, syncs=0)
    assert count(lambda: gradstat.check_async(model, backend=backend)) == Counts(launches=1, syncs=0)
    assert count(in_micro_batches) == Counts(launches=3, syncs=0)
    assert count(lambda: on_a_busy_device(check)) == Counts(launches=1 + 1, syncs=1)
    # When the last report has arrived, all others have.
    assert count(lambda: on_a_busy_device(in_micro_batches, micro_result)) == Counts(launches=1 + 3, syncs=1)
    for max_norm in (1e-3, 1e9):
        counts = count(lambda m=max_norm: gradstat.clip_grad_norm_(model.parameters(), m, backend=backend))  # type: ignore[misc]
        assert counts.syncs == 0
        if backend == "native":
            assert counts.launches == 2


def test_sparse_gradients_name_the_row_of_the_parameter() -> None:
    """In the text of reports, errors and findings, for sums of repeated rows as well."""
    embedding = nn.Embedding(100, 8, sparse=True)
    monitor = gradstat.Monitor(embedding, on_anomaly="record")
    weights = torch.tensor([1.0, 2.0, math.nan, 1.0]).unsqueeze(1)
    (embedding(torch.tensor([97, 5, 97, 3])) * weights).sum().backward()
    monitor.step()
    monitor.flush()
    finding = next(finding for finding in monitor.findings if finding.rule == "nonfinite-gradient")
    assert finding.evidence["first"] == [97, 0]
    report = gradstat.check(embedding)
    assert report["weight"].numel == report.numel == report.to_numpy()["numel"][0] == 3 * 8
    assert "100x8" in str(report)
    assert "[97, 0]" in str(report)
    message = r"weight: 8 NaN of 24 elements, first at \[97, 0\] \(shape \(100, 8\)"
    with pytest.raises(gradstat.NonFiniteGradientError, match=message):
        report.raise_if_nonfinite()
    assert pickle.loads(pickle.dumps(report))["weight"].first_nonfinite == (97, 0)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    assert gradstat.guarded_step(optimizer, 1.0).report.result()["group0.0"].first_nonfinite == (97, 0)


def test_lazy_zeros_are_measured_and_refused_where_they_would_be_written() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))]
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch._efficientzerotensor((3, 2))
    report = gradstat.check(parameters)
    assert report.ok
    assert report["param1"].zero_count == 6
    for order in (2.0, math.inf, 3.0):
        assert gradstat.get_total_norm([p.grad for p in parameters], order) > 0  # type: ignore[misc]
        assert gradstat.clip_grad_norm_(parameters, math.inf, order) > 0
        with pytest.raises(
            RuntimeError, match=r"parameters\[1\].*lazy zero tensors, which have no memory.*\.clone\(\)"
        ):
            gradstat.clip_grad_norm_(parameters, 0.5, order)
    for clip in (gradstat.AGC(), gradstat.AdaGC(), gradstat.FixedClip(0.5)):
        with pytest.raises(RuntimeError, match="lazy zero tensors"):
            clip.clip_(parameters)
    assert (parameters[0].grad == 1).all()
    gradstat.guarded_step(torch.optim.SGD(parameters, lr=1.0))
    assert (parameters[0] == 0).all()


def test_a_pending_report_shows_the_gradients_as_they_were_and_can_be_printed_and_sent(device: str) -> None:
    model = trained(make_model().to(device))
    pending = gradstat.check_async(model)
    report = gradstat.check(model)
    model[0].weight.grad.zero_()
    assert pending.result() is pending.result()
    assert str(pending) == str(report)
    assert repr(pending) == f"PendingReport({report!r})"
    sent = pickle.loads(pickle.dumps(pending))
    assert type(sent) is gradstat.PendingReport
    assert sent.done()
    assert sent.result().to_dict() == report.to_dict()
    waiting = gradstat.check_async(model)
    waiting.done = lambda: False  # type: ignore[method-assign]
    assert str(waiting) == "PendingReport(not arrived yet; result() waits)"


def test_handles_say_what_they_are() -> None:
    model = trained(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradstat.guarded_step(optimizer)
    micro_batches = gradstat.MicroBatches(model)
    micro_batches.check()
    with gradstat.Monitor(model) as monitor, gradstat.patch_torch() as patch:
        shown = {
            "Monitor(Sequential, 0 steps, 0 findings)": monitor,
            "MicroBatches(1 checked since the last result)": micro_batches,
            "StepCounters(tensor([1, 0, 0]))": gradstat.step_counters(optimizer),
        }
        assert [repr(thing) for thing in shown.values()] == list(shown)
        assert repr(patch).startswith("TorchPatch(torch.nn.utils.clip_grad_norm_, ")
    assert repr(patch) == "TorchPatch(removed)"
    handle = gradstat.auto(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert repr(handle).startswith("AutoHandle(SGD, Monitor(")
    handle.remove()
