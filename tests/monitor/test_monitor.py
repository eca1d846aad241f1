"""`Monitor`: what it measures, when it reads and reviews, its policies, its memory, and what it must not do."""

import contextlib
import copy
import dataclasses
import gc
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.training import RECORD, backpropagated, fill
from helpers.travelling import numbers_travel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import gradstat
from gradstat._core.host_copy import HostRows
from gradstat.monitor import AnomalyError, AnomalyWarning, Finding, Golden, Rule, default_rules, rule
from gradstat.recording.kinds import in_order
from gradstat.rules import LossSpike


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(relu(self.second(relu(self.norm(self.first(x))))))


def made(**options: Any) -> tuple[Net, torch.optim.Optimizer, gradstat.Monitor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, gradstat.Monitor(model, optimizer, **{"on_anomaly": "record", **options})


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    monitor: gradstat.Monitor,
    steps: int,
    bad: int | None = None,
    batch: Tensor | None = None,
) -> list[list[Finding]]:
    """Trains on ``batch`` or random ones, with a NaN gradient in step ``bad``; returns the findings of each step."""
    found = []
    for _ in range(steps):
        step = monitor.steps
        x = torch.randn(32, 8) if batch is None else batch
        loss = backpropagated(optimizer, cross_entropy(model(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))
        if step == bad:
            model.second.weight.grad[2, 3] = math.nan  # type: ignore[union-attr,index]
        found.append(monitor.step(loss))
        optimizer.step()
    return found


def test_a_healthy_run_finds_nothing_and_records_what_check_says() -> None:
    model, optimizer, monitor = made()
    nothing = "nothing is known about Net, since monitor.step() has not been called"
    assert (monitor.diagnose().ok, nothing in str(monitor.diagnose())) == (False, True)
    losses, reports = [], []
    for _ in range(70):
        x = torch.randn(32, 8)
        losses.append(backpropagated(optimizer, cross_entropy(model(x), (x[:, 0] > 0).long())))
        reports.append(gradstat.check(model))
        monitor.step(losses[-1])
        latest = monitor.latest()
        assert (latest.step, latest.report.total_norm) == (monitor.steps - 1, reports[-1].total_norm)
        optimizer.step()
    assert monitor.findings == []
    assert "nothing wrong in 70 steps of Net" in str(monitor.diagnose())
    recording = monitor.recording()
    assert recording.steps.tolist() == list(range(70))
    np.testing.assert_allclose(recording.scalars["loss"], [loss.item() for loss in losses], rtol=1e-7)
    np.testing.assert_allclose(recording.scalars["norm"], [report.total_norm for report in reports], rtol=1e-12)
    assert (recording.scalars["lr"] == 1e-3).all()
    table, rows = recording.tables["gradient"], [report.to_numpy() for report in reports]
    assert table.names == tuple(name for name, _ in model.named_parameters())
    assert table.numel.tolist() == [p.numel() for p in model.parameters()]
    for name in ("l2_norm", "mean", "min", "max", "max_abs", "nan_count"):
        np.testing.assert_allclose(table.column(name), [row[name] for row in rows], rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(table.column("std"), [row["std"] for row in rows], rtol=2e-3, atol=1e-9)
    assert recording.backward_order[-1] == "first.weight"
    assert recording.backward_order[0].startswith("last.")


def test_what_is_looked_at_now_and_then_is_in_the_recording() -> None:
    watch = dict.fromkeys(("parameters", "optimizer", "buffers", "updates", "activations", "outputs"), 10)
    model, optimizer, monitor = made(watch=watch)
    before = {}
    seen: list[weakref.ref[Tensor]] = []
    model.second.register_forward_hook(lambda _m, _i, output: seen.append(weakref.ref(output)))
    for step in range(25):
        if step in (10, 11):
            before[step] = [p.detach().clone() for p in model.parameters()]
        monitor.check_batch([torch.randn(8, 4)])
        trained(model, optimizer, monitor, 1)
    gc.collect()
    assert [activation() for activation in seen] == [None] * 25
    tables = monitor.recording().tables
    steps = {"parameter": [0, 10, 20], "activation": [0, 10, 20]}
    steps["exp_avg"] = [10, 20]  # it does not exist before the optimizer's first step
    steps["update"] = [1, 11, 21]  # measured after the optimizer steps
    assert {kind: tables[kind].steps.tolist() for kind in steps} == steps
    assert in_order(tables) == [
        *("batch", "input", "constant", "update", "parameter", "buffer", "activation", "gradient"),
        *("exp_avg", "exp_avg_sq"),
    ]
    assert tables["buffer"].names == ("norm.running_mean", "norm.running_var")
    assert tables["activation"].names == ("first", "norm", "second", "last")
    moved = torch._foreach_sub(before[11], before[10])
    for kind, expected in (("update", moved), ("parameter", before[10])):
        np.testing.assert_allclose(tables[kind].column("l2_norm")[1], [e.norm().item() for e in expected], rtol=1e-6)


@pytest.mark.parametrize(("needs_copy", "lag"), [(False, 0), (False, 3), (True, 1), (True, 2)])
def test_numbers_that_need_a_copy_are_read_so_many_steps_later(
    monkeypatch: pytest.MonkeyPatch, needs_copy: bool, lag: int
) -> None:
    """On a CPU they are read at once, whatever the lag."""
    asked: set[HostRows] = set()
    read = HostRows.table
    monkeypatch.setattr(HostRows, "table", lambda rows: (asked.add(rows), read(rows))[1])
    monkeypatch.setattr(HostRows, "needs_copy", needs_copy)
    model, optimizer, monitor = made(options={"lag": lag})
    found = trained(model, optimizer, monitor, 12, bad=10)
    late = lag if needs_copy else 0
    assert len(asked) == 12 - lag or not needs_copy
    assert not any(found[: 10 + late])
    assert late > 1 or found[10 + late][0].step == 10
    monitor.flush()
    assert len(asked) > 12  # also measurements after the finding
    finding = monitor.findings[0]
    assert (finding.rule, finding.step, finding.name) == ("nonfinite-gradient", 10, "second.weight")
    assert (finding.evidence["first"], finding.about) == ([2, 3], "gradient")


def test_warns_where_it_was_called_with_what_to_try_and_not_of_each_step() -> None:
    only = next(r for r in default_rules() if r.name == "nonfinite-gradient")
    model, optimizer, monitor = made(on_anomaly=None, rules=[only])

    def train() -> None:
        for step in range(60):
            trained(model, optimizer, monitor, 1, bad=step if step % 4 == 3 else None)
            for p in model.parameters():  # the optimizer's step made them NaN
                p.data.nan_to_num_()
            optimizer.state.clear()

    with pytest.warns(AnomalyWarning, match=r"step 3.*second\.weight.*What to try") as caught:
        train()
    assert len(monitor.findings) > 5
    assert [warning.filename for warning in caught] == [__file__]


def test_raises_with_the_first_finding_when_all_are_acted_on() -> None:
    seen: list[str] = []
    policy = ("raise", lambda _, finding: seen.append(finding.rule))
    model, optimizer, monitor = made(
        on_anomaly=dict.fromkeys(("error", "nonfinite-loss", "nonfinite-gradient"), policy)
    )
    model.first.weight.detach()[0, 0] = math.nan
    with pytest.raises(AnomalyError, match=r"nonfinite-parameter.*first\.weight") as caught:
        trained(model, optimizer, monitor, 1)
    assert {"nonfinite-parameter", "nonfinite-loss", "nonfinite-gradient"} <= set(seen)
    assert caught.value.finding == monitor.findings[0]
    assert "what to try" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("skips", [False, True])
def test_one_nan_is_one_error_and_what_follows_is_named_below_it(skips: bool) -> None:
    model, optimizer, monitor = made(on_anomaly={"error": ("record", *["skip"] * skips)})
    trained(model, optimizer, monitor, 30, bad=3)
    trained(model, optimizer, monitor, 10, bad=35)
    errors = [(finding.rule, finding.step) for finding in monitor.findings if finding.severity == "error"]
    assert errors == [("nonfinite-gradient", 3), ("nonfinite-gradient", 35)][: 1 + skips]
    followed = ["nonfinite-loss", "nonfinite-optimizer-state", "nonfinite-parameter"]
    text = " ".join(str(monitor.diagnose()).split())
    assert all(re.search(rf"{rule}( of \S+)? by step", text) for rule in followed) == (not skips)
    assert text.count("followed by:") == (not skips)
    assert text.count("nonfinite-gradient (error)") == 1 + skips


@pytest.mark.parametrize("at", [2, 3, 102, 103])
def test_what_an_event_explains_becomes_an_info_that_names_it(at: int) -> None:
    event = rule("event")(lambda rule, window: [rule.found(2, "it", "") for step in window.steps if step == 2])
    event.explains = ("effect", "failure")
    effect, failure = (
        rule(name, severity=severity)(lambda rule, window: [rule.found(at, "it", "") for s in window.steps if s == at])
        for name, severity in (("effect", "warning"), ("failure", "error"))
    )
    model, optimizer, monitor = made(rules=[effect(), event(), failure()])
    trained(model, optimizer, monitor, 110)
    monitor.flush()
    told = {finding.rule: (finding.severity, finding.evidence.get("follows")) for finding in monitor.findings}
    cause = "event in step 2" if at <= 102 else None
    assert told["effect"] == ("info" if cause else "warning", cause)
    assert told["failure"] == ("error", cause)  # its policies still apply


def test_a_nan_that_came_after_all_was_finite_again_is_no_consequence() -> None:
    """The program skips the first bad step itself, which nothing tells the monitor."""
    model, optimizer, monitor = made(watch={"parameters": 10})
    trained(model, optimizer, monitor, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "step", lambda: None)
        trained(model, optimizer, monitor, 1, bad=3)
    trained(model, optimizer, monitor, 21)
    model.first.bias.detach()[1] = math.nan
    trained(model, optimizer, monitor, 15)
    errors = [(finding.rule, finding.step) for finding in monitor.findings if finding.severity == "error"]
    assert errors == [("nonfinite-gradient", 3), ("nonfinite-parameter", 25)]


@pytest.mark.parametrize(
    ("frozen", "told"),
    [
        (("2.", "4."), "warning 2.weight between layers that train"),
        (("0.", "2."), "info 0.weight"),  # as for transfer learning
        (("4.", "6."), "info 4.weight"),
        (("0.", "2.", "6."), "info 0.weight"),
        (("2.bias",), "info 2.bias"),
    ],
)
def test_layers_that_are_frozen_between_others_are_a_warning(frozen: tuple[str, ...], told: str) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter)  # as trained ones are, not uniform
        parameter.requires_grad_(not name.startswith(frozen))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradstat.Monitor(model, optimizer, on_anomaly="record") as monitor:
        monitor.step(backpropagated(optimizer, model(torch.randn(8, 8)).square().mean()))
    severity, name, *words = told.split()
    (found,) = (finding for finding in monitor.findings if finding.rule == "optimizer-coverage")
    assert (found.severity, found.name) == (severity, name)
    assert " ".join(words) in found.text
    assert ("between" in found.text) == bool(words)


def test_a_frozen_integer_parameter_is_no_matter() -> None:
    model, _, _ = made()
    model.seed = nn.Parameter(torch.arange(3), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = gradstat.Monitor(model, torch.optim.SGD(model.first.parameters(), lr=0.1))
        trained(model, monitor.recorder.optimizer, monitor, 3)
        monitor.remove()
    assert not monitor.findings
    assert "seed" not in monitor.recording().tables["parameter"].names


@pytest.mark.parametrize("is_seen_by", ["loss", "output", "auto"])
@pytest.mark.parametrize(("others", "is_told"), [("list", 2), ("frozen", 0), ("critic", 0), ("child", 0)])
def test_parameters_that_nobody_trains_are_told(others: str, is_told: int, is_seen_by: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.rest: Any = [last] if others != "child" else nn.ModuleList([last])

        def forward(self, x: Tensor) -> Tensor:
            return self.rest[0](self.first(x))

    model = Holder()
    model.rest[0].requires_grad_(others != "frozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    another = torch.optim.SGD(model.rest[0].parameters(), lr=0.01) if others == "critic" else None
    if is_seen_by == "auto":
        monitor = gradstat.auto(model, optimizer, on_anomaly="record").monitor
    else:
        monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for _ in range(20):
        loss = backpropagated(optimizer, model(torch.randn(8, 8)).square().mean())
        if is_seen_by != "auto":
            monitor.step(loss if is_seen_by == "loss" else loss.detach())
        optimizer.step()
        if another is not None:
            another.step()
            another.zero_grad()
    monitor.flush()
    told = [finding.evidence["parameters"] for finding in monitor.findings if "the loss depends on" in finding.text]
    assert told == [is_told] * bool(is_told)


@pytest.mark.parametrize(("trains", "is_rival"), [("another", True), ("the rest", False), ("the same", False)])
def test_an_optimizer_of_something_else_is_noticed(trains: str, is_rival: bool) -> None:
    seen: list[bool] = []
    looks = rule("looks")(lambda _, window: seen.append(window.run.has_other_optimizer))
    model, critic = Net(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.01)
    others = {"another": critic, "the rest": model.last, "the same": model.first}[trains]
    other = torch.optim.SGD(others.parameters(), lr=0.01)
    monitor = gradstat.Monitor(model, optimizer, rules=[looks()], on_anomaly="record")
    for _ in range(3):
        critic(model(torch.randn(8, 8))).square().mean().backward()
        monitor.step()
        optimizer.step()
        other.step()
    monitor.flush()
    assert seen[-1] == is_rival


@pytest.mark.parametrize(
    ("thawed_from", "critic_trains", "is_told"),
    [(200, True, True), (0, True, False), (60, True, False), (200, False, False)],
    ids=["never", "in each turn", "later", "layers that are frozen at first"],
)
def test_a_network_that_is_not_thawed_for_its_own_turn_is_told(
    thawed_from: int, critic_trains: bool, is_told: bool
) -> None:
    torch.manual_seed(0)
    encoder, generator, critic = nn.Linear(4, 4), nn.Linear(4, 16), nn.Linear(16, 1)
    maker = nn.Sequential(encoder, generator)
    for parameter in maker.parameters():
        nn.init.normal_(parameter)  # as trained ones are, not uniform
    critic.requires_grad_(critic_trains)
    of_maker, of_critic = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, critic))
    monitor = gradstat.Monitor(maker, of_maker, on_anomaly="record")
    for step in range(120):
        inputs = torch.randn(8, 4)
        generator.requires_grad_(False)
        if critic_trains:
            backpropagated(of_critic, critic(maker(inputs).detach()).square().mean())
            of_critic.step()
        if step >= thawed_from:
            generator.requires_grad_(True)
        monitor.step(backpropagated(of_maker, critic(maker(inputs)).sub(1).square().mean()))
        of_maker.step()
    monitor.flush()
    told = [(f.step, f.name) for f in monitor.findings if f.rule == "optimizer-coverage" and f.severity == "warning"]
    assert told == [(0, "1.weight")] * is_told


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("is_watched_first", [False, True])
@pytest.mark.parametrize("is_complete", [False, True])
def test_each_of_two_optimizers_may_have_a_part_of_the_model(
    is_complete: bool, is_watched_first: bool, accumulated: int
) -> None:
    model = Net()
    rest = {id(parameter) for parameter in model.last.parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if id(p) not in rest], lr=0.01)
    other = torch.optim.AdamW([*model.last.parameters()][: 2 if is_complete else 1])
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for step in range(60):
        model(torch.randn(8, 8)).square().mean().backward()
        monitor.step()
        if step % accumulated == accumulated - 1:
            for one in (optimizer, other)[:: 1 if is_watched_first else -1]:
                one.step()
                one.zero_grad()
    monitor.flush()
    told = [(one.step, one.name) for one in monitor.findings if one.rule == "optimizer-coverage"]
    assert told == ([] if is_complete else [(0, "last.bias")])


@pytest.mark.parametrize("is_wrapper", [False, True])
def test_another_optimizer_of_the_same_parameters_is_told(is_wrapper: bool) -> None:
    model, optimizer, monitor = made(on_anomaly="record")
    other = type(optimizer)(model.parameters(), lr=1e-3)
    if is_wrapper:  # as that of Lookahead, which has the groups of the optimizer inside
        other.param_groups = optimizer.param_groups
    optimizer.register_step_post_hook(lambda *_: other.step())
    trained(model, optimizer, monitor, 60)
    monitor.flush()
    told = [one.text for one in monitor.findings if one.rule == "optimizer-coverage"]
    text = "another optimizer (AdamW) steps the same parameters: it took 49 steps in the last 49, beside 49"
    assert told == ([] if is_wrapper else [f"{text} of the optimizer that is watched"])


class Normalized(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        super().step()


@pytest.mark.parametrize(
    ("optimizer_of", "dtype", "cause"),
    [
        (torch.optim.Adam, torch.float16, "its eps of 1e-08 is 0 in torch.float16"),
        (torch.optim.RMSprop, torch.float16, "its eps of 1e-08 is 0 in torch.float16"),
        (Normalized, torch.float32, "0 / 0 for a zero gradient"),
    ],
)
def test_an_optimizer_that_makes_nan_of_finite_gradients_is_blamed(
    optimizer_of: Any, dtype: torch.dtype, cause: str
) -> None:
    model = nn.Linear(4, 2).to(dtype)
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    for step in range(5):
        x = torch.randn(8, 4, dtype=dtype) * torch.tensor([0, 1, 1, 1], dtype=dtype)
        factor = step < 2 or optimizer_of is not Normalized
        monitor.step(backpropagated(optimizer, model(factor * x)[:, 0].square().mean() * factor))
        optimizer.step()
    (error,) = [finding for finding in monitor.findings if finding.severity == "error"]
    assert (error.rule, cause in error.causes[0]) == ("nonfinite-parameter", True)
    assert "all gradients have been finite since" in error.text


def test_a_state_is_healthy_without_errors_lately_and_with_all_finite() -> None:
    model, optimizer, monitor = made(on_anomaly="skip")
    trained(model, optimizer, monitor, 3)
    assert monitor.is_healthy()
    trained(model, optimizer, monitor, 6, bad=3)
    assert [monitor.is_healthy(), monitor.is_healthy(within=5), monitor.is_healthy(within=6)] == [False, True, False]
    moment = optimizer.state[model.first.weight]["exp_avg"]
    for tensor, is_healthy in ((model.first.weight, False), (moment, False), (model.norm.running_mean, True)):
        kept = tensor.detach().clone()
        tensor.detach()[0] = -math.inf
        assert monitor.is_healthy(within=0) == is_healthy
        tensor.detach().copy_(kept)


def test_a_state_is_not_healthy_while_an_error_lasts() -> None:
    """A rule reports it once, when it begins."""

    @rule("lasting", severity="error")
    def lasting(self: Rule, window: Any) -> list[Finding]:
        lasts = [step for step in window.steps.tolist() if step >= 3 and self.begins("", step)]
        return [self.found(step, "loss", "it lasts") for step in lasts]

    model, optimizer, monitor = made(rules=[lasting(), *default_rules()])
    trained(model, optimizer, monitor, 12)
    assert len(monitor.findings) == 1
    _, _, again = made(rules=[lasting()])
    again.load_state_dict(monitor.state_dict())
    assert (monitor.is_healthy(within=5), again.is_healthy(within=5)) == (False, False)


def test_rolls_back_to_the_last_healthy_state_however_late_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, monitor = made(on_anomaly={"error": "rollback"}, options={"rollback_every": 5})
    trained(model, optimizer, monitor, 10)
    at_ten = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(model, optimizer, monitor, 3)
    model.first.weight.detach()[0, 0] = math.inf
    trained(model, optimizer, monitor, 1)  # the optimizer steps without gradients, which changes nothing
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    for key, value in at_ten[0].items():
        if "num_batches" not in key and "running" not in key:  # the snapshot is from within step 10
            assert torch.equal(state[key], value), key
    for number, held in at_ten[1]["state"].items():
        assert torch.equal(optimizer_state["state"][number]["exp_avg"], held["exp_avg"])
    monitor.remove()
    numbers_travel(monkeypatch)
    options = {"rollback_every": 2, "lag": 5}
    late = gradstat.Monitor(model, optimizer, on_anomaly={"error": "rollback"}, options=options)
    trained(model, optimizer, late, 20)
    model.first.weight.data[0, 0] = math.inf
    trained(model, optimizer, late, 6)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("happens", ["cleared", "zeros", "a rollback", "a resumption", "another optimizer's"])
def test_a_state_that_is_lost_is_told_unless_the_training_goes_back(happens: str) -> None:
    model, optimizer, monitor = made(on_anomaly={**RECORD, "error": "rollback"})
    trained(model, optimizer, monitor, 45)
    if happens == "cleared":
        optimizer.state.clear()
    elif happens == "zeros":
        for tensor in (tensor for state in optimizer.state.values() for tensor in state.values()):
            tensor.zero_()
    elif happens == "a resumption":
        saved = monitor.state_dict()
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
        monitor.load_state_dict(saved, expect_restored=False)
    elif happens == "a rollback":
        trained(model, optimizer, monitor, 1, bad=45)
    else:
        torch.optim.AdamW(model.parameters()).state.clear()
    trained(model, optimizer, monitor, 60)
    monitor.remove()
    told = [(one.step, one.text.rpartition(": ")[2]) for one in monitor.findings if one.rule == "optimizer-memory"]
    assert told == [(45, "its step counter fell from 31 to 5")] * (happens in ("cleared", "zeros"))


def test_a_state_of_another_shape_is_not_gone_back_to() -> None:
    model, optimizer, monitor = made(on_anomaly={**RECORD, "error": "rollback"}, options={"rollback_every": 1})
    trained(model, optimizer, monitor, 4)
    model.second = nn.Linear(16, 16, bias=False)
    optimizer.add_param_group({"params": [model.second.weight]})
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(RuntimeWarning, match="no healthy snapshot of this model"):
        trained(model, optimizer, monitor, 1, bad=4)
    assert torch.equal(model.norm.num_batches_tracked, before["norm.num_batches_tracked"] + 1)  # not even in part
    monitor.remove()


@pytest.mark.parametrize("calls", [True, False])
def test_calls_what_a_rule_is_given_and_without_policies_only_records(calls: bool) -> None:
    seen: list[str] = []
    policies = [lambda m, finding: seen.append(f"{m.steps} {finding.rule}")] * calls
    model, optimizer, monitor = made(on_anomaly={"nonfinite-gradient": policies})
    trained(model, optimizer, monitor, 3, bad=2)  # a warning would be an error
    assert seen == ["3 nonfinite-gradient"] * calls
    assert [finding.rule for finding in monitor.findings] == ["nonfinite-gradient"]


def test_a_loss_scaler_that_was_not_given_is_found_in_the_first_step() -> None:
    scale_of_torch = torch.amp.GradScaler.scale
    for earlier in gc.get_objects():  # monitors of earlier tests count while they are open
        if type(earlier) is gradstat.Monitor:
            earlier.remove("its test is over")
    for count, norm in ((1, 1.0), (2, 4096.0)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        monitors = [gradstat.Monitor(model, optimizer, on_anomaly="record") for _ in range(count)]
        loss = model(torch.ones(1, 1)).sum()
        scaler.scale(loss).backward()
        for monitor in monitors:
            monitor.step(loss)
        assert [monitor.scaler is scaler for monitor in monitors] == [count == 1] * count
        assert monitors[0].recording().scalars["norm"].tolist() == [norm]
        assert torch.amp.GradScaler.scale is not scale_of_torch  # clips are heard in further steps
        for monitor in monitors:
            monitor.remove()
        assert torch.amp.GradScaler.scale is scale_of_torch
    monitor = gradstat.Monitor(model, optimizer)
    assert torch.amp.GradScaler.scale is not scale_of_torch
    del monitor
    assert torch.amp.GradScaler.scale is scale_of_torch


GUARD = gradstat.SpikeGuard()
STEPPED = {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "adam"}, TypeError, "optimizer: expected"),
        ({"options": {"history": -1}}, ValueError, "history is -1"),
        ({"options": {"lag": 0.5}}, ValueError, "lag is 0.5"),
        ({"options": {"lagg": 1}}, ValueError, "unknown name 'lagg'; known: history, max_bytes, lag, review_every, "),
        ({"options": 5}, TypeError, "options: expected MonitorOptions or a mapping, got int"),
        ({"watch": {"weights": 1}}, ValueError, "cannot watch 'weights'; known: gradients"),
        ({"watch": {"parameters": -1}}, ValueError, "expected 0 for never"),
        ({"watch": {"parameters": 0.5}}, TypeError, "expected a number of steps"),
        ({"watch": {"gradients": 2}}, ValueError, "is 2; gradients must be measured in every step"),
        ({"watch": {"origin": 1}}, TypeError, "needs a DistributedDataParallel"),
        ({"on_anomaly": "explode"}, ValueError, "unknown policy 'explode'"),
        ({"on_anomaly": {"fatal": "warn"}}, ValueError, "expected a severity"),
        ({"on_anomaly": {"error": "wran"}}, ValueError, "unknown policy 'wran'"),
        ({"on_anomaly": "skip"}, TypeError, "needs the optimizer"),
        ({"on_anomaly": "replay"}, TypeError, "replay=step_fn"),
        ({"num_classes": 0}, ValueError, "num_classes is 0"),
        ({"num_classes": True}, ValueError, "num_classes is True"),
        ({"num_classes": {"batch": -1}}, ValueError, "num_classes is {'batch': -1}"),
        ({"model": [nn.Linear(2, 2)]}, TypeError, r"expected a torch\.nn\.Module, got list"),
        ({"rules": [default_rules]}, TypeError, "expected instances"),
        ({"rules": [type(default_rules()[0])]}, TypeError, "make an instance"),
        ({"max_norm": -1.0}, ValueError, "max_norm is -1.0; expected a number above 0, or None"),
        ({"max_norm": "1"}, TypeError, "max_norm: expected a number, an adaptive clip or None, got str"),
        ({"guard": 6.0}, TypeError, "expected a gradstat.SpikeGuard, got float"),
        ({"guard": GUARD}, TypeError, "a guard needs the optimizer"),
        ({"save_to": 5}, TypeError, "save_to: expected a path, got int"),
        ({"guard": gradstat.SpikeGuard(scale=0.1), **STEPPED}, ValueError, "without scale="),
        ({"guard": GUARD, "scaler": torch.amp.GradScaler("cpu"), **STEPPED}, ValueError, "guarded_step"),
    ],
)
def test_arguments_that_make_no_sense_leave_no_hook(options: dict[str, Any], error: Any, message: str) -> None:
    model = Net()
    with pytest.raises(error, match=message) as caught:
        gradstat.Monitor(**{"model": model, "watch": ["outputs", "activations"], **options})
    assert caught.value.__traceback__ is not None  # holds what the constructor made
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_given_scalars_are_recorded_compared_and_judged_if_asked() -> None:
    def recorded(kl: float) -> gradstat.monitor.Recording:
        model = nn.Linear(4, 2)
        monitor = gradstat.Monitor(model, on_anomaly="record", rules=[LossSpike(series="entropy")])
        for step in range(160):
            model(torch.randn(8, 4)).square().mean().backward()
            entropy = torch.tensor(1.0 + step % 3 / 100 if step < 120 else 9.0)
            monitor.step(1.0, scalars={"entropy": entropy, "kl": kl - step % 5 / 100})
        told = [(found.severity, found.step, found.name) for found in monitor.findings]
        assert told == [("info", 120, "entropy"), ("warning", 120, "entropy")]
        return monitor.recording()

    golden = Golden.of([recorded(kl) for kl in (-1.0, -1.01, -1.02)])
    assert {found.name for found in golden.compare(recorded(1.0)).findings} >= {"kl"}
    monitor = gradstat.Monitor(nn.Linear(4, 2))
    for wrong in ({"norm": 1.0}, {"lr[1]": 1.0}, {"kl": torch.ones(2)}, {"kl": "1"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong)).replace("[", ".")):
            monitor.step(1.0, scalars=wrong)  # type: ignore[arg-type]
    assert monitor.steps == 0


def test_a_loss_is_noted_in_its_step_and_one_that_is_no_number_is_refused() -> None:
    model, _, monitor = made(options={"review_every": 2})
    for loss in (1.0, 1.0, 1.0, math.nan, 1.0, math.inf):
        fill(model)
        monitor.step(loss)
    for wrong in (torch.zeros(3), torch.zeros((), dtype=torch.long), "low"):
        with pytest.raises((TypeError, ValueError), match=r"loss is a (tensor of shape|str)"):
            monitor.step(wrong)  # type: ignore[arg-type]
    monitor.step(1.5)  # the step may be told anew
    model.zero_grad()
    monitor.step()
    scalars = monitor.recording().scalars
    assert scalars["loss_nonfinite"].tolist() == [0, 0, 0, 1, 0, 2, 0, 0]
    assert scalars["missing"].tolist() == [0] * 7 + [8]


def test_labels_out_of_range_are_reported_before_the_forward_pass() -> None:
    """``num_classes`` may name the labels among other integers by their place in the batch."""
    labels = torch.tensor([0, 3, -100, 1, 2, 0])
    for classes, inputs in ((4, torch.randn(6, 8)), ({"batch['y']": 4}, torch.full((6, 8), 30_000))):
        _, _, monitor = made(num_classes=classes)
        assert monitor.check_batch({"x": inputs, "y": labels}) == []
        (found,) = monitor.check_batch({"x": inputs, "y": labels.clamp(0) + 1})
        assert (found.rule, found.name, found.step) == ("label-out-of-range", "batch['y']", 0)
        assert found.evidence["high"] == 4


@dataclasses.dataclass
class Sample:
    inputs: torch.Tensor


def test_a_bad_batch_is_named_and_comes_first_in_the_diagnosis() -> None:
    model, optimizer, monitor = made()
    trained(model, optimizer, monitor, 5)
    x = torch.randn(32, 8)
    x[7, 2] = math.nan
    monitor.check_batch({"a": ("id", [Sample(x)])})
    trained(model, optimizer, monitor, 1, batch=x)
    first = monitor.diagnose().findings[0]
    assert (first.rule, first.name, first.evidence["first"]) == ("nonfinite-batch", "batch['a'][1][0].inputs", [7, 2])


def test_batches_and_parameters_of_changing_sizes_are_judged_by_their_own_sizes() -> None:
    model, optimizer, monitor = made()
    sizes = (4, 4, 4, 4, 4, 32, 16, 8)  # the last four are reviewed together
    for size in sizes:
        x = torch.tensor([0.0, 2.0]).repeat_interleave(size // 2)[:, None].repeat(1, 8)
        if size == 32:
            x[31, 7] = math.nan
        monitor.check_batch(x)
        trained(model, optimizer, monitor, 1)
    table = monitor.recording().tables["batch"]
    assert table.column("mean")[:, 0].tolist() == pytest.approx([1.0] * len(sizes), abs=0.01)
    assert table.column("zero_fraction")[:, 0].tolist() == [0.5] * len(sizes)
    (found,) = [finding for finding in monitor.findings if finding.rule == "nonfinite-batch"]
    assert (found.step, found.evidence["first"]) == (5, [31, 7])
    layer = nn.Linear(4, 4, bias=False)
    monitor = gradstat.Monitor(layer, on_anomaly="record", rules=[])
    for size in (4, 4, 4, 8, 8):
        if size != layer.weight.shape[0]:
            layer.weight = nn.Parameter(torch.ones(size, 4))
        fill(layer)
        monitor.step()
    table = monitor.recording().tables["gradient"]
    assert (table.column("mean")[:, 0].tolist(), table.numel.tolist()) == ([1.0] * 5, [32])


def test_a_module_with_several_outputs_is_measured_over_all_of_them() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.ones(2, 2), torch.zeros(4, 3).index_fill(0, torch.tensor(3), math.nan)

    model = nn.ModuleDict({"two": Two(), "last": nn.Linear(2, 2)})
    monitor = gradstat.Monitor(model, on_anomaly="record", watch="activations")
    for _ in range(2):  # of one step
        model["two"](torch.ones(1))
    monitor.step()
    table = monitor.recording().tables["activation"]
    assert table.numel.tolist() == [32]
    assert table.column("mean")[0, 0] == pytest.approx(8 / 26)
    (found,) = [finding for finding in monitor.findings if finding.rule == "nonfinite-activation"]
    assert (found.evidence["nan_count"], found.evidence["numel"]) == (6, 32)


def test_every_step_is_reviewed_once_in_order() -> None:
    reviewed: list[list[int]] = []

    @rule("noting")
    def noting(self: Rule, window: Any) -> tuple[()]:
        reviewed.append(window.steps.tolist())
        assert window.rows("gradient").steps.tolist() == window.steps.tolist()
        assert window.latest["gradient"].steps.tolist() == window.steps[-1:].tolist()
        return ()

    model, optimizer, monitor = made(rules=[noting()], options={"review_every": 7})
    for _ in range(40):
        monitor.check_batch(torch.randn(32, 8))  # a healthy batch does not cause a review
        trained(model, optimizer, monitor, 1, bad=17)
    monitor.flush()
    assert [step for steps in reviewed for step in steps] == list(range(40))
    assert [len(steps) for steps in reviewed[:6]] == [1, 1, 2, 4, 7, 3]


def test_a_monitor_in_use_goes_back_to_a_state_whole(tmp_path: Path) -> None:
    interrupts = iter([True])

    def interrupt_once(_monitor: gradstat.Monitor, _finding: Finding) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt

    policy = {"error": (interrupt_once, "rollback", "warn")}
    model, optimizer, monitor = made(on_anomaly=policy, options={"rollback_every": 3}, watch=["updates"])
    trained(model, optimizer, monitor, 10)
    state = monitor.state_dict()
    trained(model, optimizer, monitor, 3)  # not reviewed yet
    monitor.check_batch(torch.full((4, 8), math.nan))  # so that there are two errors, of which one waits
    with pytest.raises(KeyboardInterrupt):
        trained(model, optimizer, monitor, 4, bad=13)
    monitor.load_state_dict(state)
    assert monitor.latest() is None
    assert monitor.findings == []
    with pytest.warns(RuntimeWarning, match="no healthy snapshot"), pytest.warns(AnomalyWarning, match="step 11"):
        trained(model, optimizer, monitor, 2, bad=11)  # warns again, and no snapshot is from a later step
    assert monitor.recording().steps.tolist() == list(range(12))
    monitor.save(tmp_path / "run.gradstat")  # this would raise if steps did not increase


def test_no_update_is_measured_across_a_rollback() -> None:
    model, optimizer, monitor = made(on_anomaly="rollback", options={"rollback_every": 1}, watch={"updates": 1})
    trained(model, optimizer, monitor, 4, bad=3)
    trained(model, optimizer, monitor, 3)
    table = monitor.recording().tables["update"]
    assert table.steps.tolist() == [1, 2, 3, 5, 6]
    in_steps = table.column("l2_norm") / (1e-3 * np.sqrt(table.numel))  # 1e-3 is the learning rate
    assert ((in_steps > 0) & (in_steps < 2)).all()


def test_a_loss_scale_of_zero_loses_no_step() -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    monitor = gradstat.Monitor(model, None, scaler, on_anomaly="record")
    for scale in (1.0, 0.0, 1.0):
        scaler._scale.fill_(scale)
        fill(model, scale)
        monitor.step()
    assert np.isnan(monitor.recording().scalars["norm"]).tolist() == [False, True, False]


def test_a_batch_is_measured_as_often_as_asked_and_kept_for_a_replay_anyway() -> None:
    for period, steps in ((1, [0, 1, 2, 3]), (2, [0, 2]), (0, [])):
        _, _, monitor = made(watch={"inputs": period}, replay=True)
        for _ in range(4):
            batch = torch.randn(4, 8)
            monitor.check_batch(batch)
            monitor.step(1.0)
        table, given = monitor.recording().tables.get("batch"), []
        assert ([] if table is None else table.steps.tolist()) == steps
        monitor.replay(lambda batch: given.append(batch))  # noqa: B023
        assert given[0] is batch


def interrupt(_monitor: gradstat.Monitor, finding: Finding) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("policy", ["raise", interrupt])
def test_an_anomaly_that_raises_takes_no_step_along(policy: Any) -> None:
    @rule("late", severity="error")
    def late(self: Rule, window: Any) -> list[Finding]:
        return [self.found(6, "step", "there it was")] if 6 in window.steps else []

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    monitor = gradstat.Monitor(model, on_anomaly=policy, rules=[late()])
    raised = []
    for step in range(9):
        if step == 7:  # a new layout, so that the steps before are reviewed while this one is added
            model[0].bias = None
        model(torch.ones(3)).sum().backward()
        try:
            monitor.step(0.5)
        except (AnomalyError, KeyboardInterrupt):
            raised.append(step)
    assert raised == [7]
    assert monitor.recording().steps.tolist() == list(range(9))


def test_assert_healthy_passes_and_fails(assert_healthy: Any) -> None:
    model, optimizer, _ = made()
    assert assert_healthy is gradstat.monitor.assert_healthy  # the fixture

    def step() -> Tensor:
        x = torch.randn(32, 8)
        return backpropagated(optimizer, cross_entropy(model(x), (x[:, 0] > 0).long()))

    def steps() -> Iterator[Tensor]:
        for _ in range(30):
            yield step()
            optimizer.step()

    assert assert_healthy(model, 60, step, optimizer, loss_falls=True).ok
    model.norm.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(gradstat.monitor.UnhealthyTrainingError, match="missing-gradient"):
        assert_healthy(model, steps(), optimizer=optimizer)
    assert_healthy(model, steps(), optimizer=optimizer, allow="missing-gradient")
    with pytest.raises(TypeError, match="needs step_fn"):
        assert_healthy(model, 3)


pytest_plugins = ["gradstat.pytest_plugin"]


class Rooted(nn.Module):
    """Takes the square root after dropout, whose derivative is infinite if anything was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x).abs() + 1).sqrt().sum()  # the root


def test_replays_the_very_step_by_itself_and_says_where() -> None:
    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        loss = backpropagated(optimizer, model(x))
        monitor.step(loss)
        return loss

    monitor = gradstat.Monitor(model, optimizer, on_anomaly={"error": ("replay", "raise")}, replay=step)
    torch.manual_seed(1)

    def train() -> None:
        for _ in range(300):
            batches.append(torch.randn(2, 4))
            monitor.check_batch(batches[-1])
            step(batches[-1])
            optimizer.step()

    with pytest.warns(AnomalyWarning, match="derivative of sqrt"), pytest.raises(AnomalyError, match="sqrt"):
        train()
    culprit = monitor.culprit
    assert (culprit.kind, culprit.phase, culprit.op, culprit.module) == ("inf", "backward", "sqrt", "")
    assert culprit.line.endswith("# the root")
    assert 1 < monitor.steps == len(batches)
    assert "the root" in str(monitor.diagnose())
    assert monitor.recording().meta["culprit"].startswith(f"replay of step {monitor.steps - 1}: Inf was first")


def test_the_replay_of_the_cause_is_not_replaced_by_one_of_a_consequence() -> None:
    """NaN goes on in the weights. Once steps have been finite in between, another is replayed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    good = [parameter.detach().clone() for parameter in model.parameters()]

    def step() -> Tensor:
        values = torch.ones(1 if at == 10 else 8, 1) if at != 50 else -torch.ones(8, 1)
        scaled = (values.std() if at == 10 else values.log().sum()) * 0 + 1  # the cause
        return backpropagated(optimizer, (model(torch.randn(8, 4)) * scaled).square().mean()).detach()

    monitor = gradstat.Monitor(model, optimizer, replay=step, on_anomaly="replay")
    replays = []
    for at in range(80):
        if at == 45:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), good, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            monitor.step(step())
        optimizer.step()
        replays.append(None if monitor.culprit is None else monitor.culprit.op)
    assert replays == [None] * 10 + ["std"] * 40 + ["log"] * 30


def test_a_replay_that_cannot_run_is_refused_at_once_and_not_at_the_incident() -> None:
    model = nn.Linear(2, 2)
    expected = r"replay: expected a function .* of no argument or of the batch alone, got .*<l"
    for wrong in (lambda x, y: None, lambda *, batch: None):
        with pytest.raises(TypeError, match=expected):
            gradstat.Monitor(model, replay=wrong)
    assert not model._forward_pre_hooks
    monitor = gradstat.Monitor(model, on_anomaly="replay", replay=lambda batch: model(batch).sum().backward())
    with pytest.raises(TypeError, match=r"which the monitor does not have; call monitor\.check_batch\(batch\) before"):
        monitor.step()
    assert monitor.steps == 0


@pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")
@pytest.mark.parametrize("takes", ["batch", "nothing", "either"])
def test_the_documented_replay_runs_with_the_batch_if_the_function_takes_one(takes: str) -> None:
    model, newest = nn.Linear(2, 1), torch.ones(1, 2)

    def step(batch: Tensor) -> None:
        model.zero_grad()
        model(batch).square().sum().backward()

    functions: Any = {"batch": step, "nothing": lambda: step(newest), "either": lambda batch=None: step(batch)}
    monitor = gradstat.Monitor(model, replay=functions[takes], on_anomaly="replay")
    for value in (1.0, math.nan):
        newest = torch.full((1, 2), value)
        monitor.check_batch(newest)
        step(newest)
        monitor.step()
    assert monitor.culprit.phase == "input"


def test_a_replay_on_request_leaves_everything_and_refuses_a_step_that_was_not_skipped() -> None:
    model, optimizer, monitor = made(replay=True, on_anomaly="skip")
    trained(model, optimizer, monitor, 3)
    x = torch.randn(32, 8)

    def step() -> None:
        backpropagated(optimizer, cross_entropy(model(x), torch.zeros(32, dtype=torch.long)))

    with pytest.raises(RuntimeError, match="parameters have changed"):
        monitor.replay(step)
    step()
    model.last.weight.grad[0, 0] = math.nan  # type: ignore[index]  # as a flipped bit would
    monitor.step()
    optimizer.step()
    assert monitor.replay(step) is None
    assert "hardware" in str(monitor.diagnose())
    x[3, 3] = math.inf
    step()
    monitor.step()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert monitor.replay(step).kind in ("inf", "nan")
    torch.testing.assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0, equal_nan=True)
    assert monitor.steps == 5


def test_a_replay_without_saved_state_uses_the_current_one() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 6))
    x = torch.zeros(4, 6)
    monitor = gradstat.Monitor(model, on_anomaly="record")

    def step() -> None:
        (model(x) * 0).sum().sqrt().backward()

    step()
    (finding,) = monitor.step()
    assert any("replay=step_fn" in advice for advice in finding.advice)
    with pytest.warns(RuntimeWarning, match=r"no state of the step was saved.*Monitor\(..., replay=True\)"):
        culprit = monitor.replay(step)
    assert (culprit.phase, culprit.op) == ("backward", "sqrt")
    assert "no state of the step was saved" in str(monitor.diagnose())
    with pytest.warns(RuntimeWarning):
        assert monitor.replay(lambda: model(x).sum().backward()) is None
    with pytest.raises(TypeError, match="no function to run"):
        monitor.replay()


def test_the_culprit_of_a_step_is_not_blamed_for_a_later_one() -> None:
    model, _, monitor = made(replay=True, on_anomaly={"nonfinite-loss": "raise", "error": "record"})
    x = torch.full((4, 8), math.inf)
    model(x).sum().backward()
    monitor.step()
    assert monitor.replay(lambda: model(x).sum().backward()) is not None
    state = monitor.state_dict()
    model.zero_grad()
    with pytest.raises(AnomalyError) as caught:
        monitor.step(math.nan)
    assert "input" not in str(caught.value)
    monitor.load_state_dict(state)
    assert (monitor.culprit, monitor.diagnose().culprit) == (None, "")


def test_what_went_wrong_is_on_the_disk_at_once(tmp_path: Path) -> None:
    from gradstat.recording import load

    path = tmp_path / "run.gradstat"
    model, optimizer, monitor = made(save_to=path, on_anomaly={"error": ("record", "snapshot", "raise")})
    with pytest.raises(AnomalyError):
        trained(model, optimizer, monitor, 5, bad=4)
    (snapshot,) = tmp_path.glob("run-step4-*.gradstat")
    for file in (path, snapshot):
        recording = load(file)
        assert recording.findings[0].step == 4
        assert recording.steps[-1] == 4
        assert "second.weight" in recording.meta["why"]
    monitor.remove()
    assert load(path).meta["why"] == "the run ended"


def test_gradients_whose_squares_overflow_switch_no_rule_off() -> None:
    """numpy warns of the overflow, which is an error here and would switch the rule off."""
    model = nn.Linear(4, 4, dtype=torch.float64)
    monitor = gradstat.Monitor(model, on_anomaly="record")
    for step in range(60):
        fill(model, 1e250 if step >= 50 else 1.0)
        monitor.step(1.0)
    monitor.flush()
    assert "exploding-gradient" in {finding.rule for finding in monitor.findings}


def test_a_state_of_an_optimizer_that_is_called_as_something_else_does_not_take_its_place() -> None:
    model, optimizer, monitor = made(watch={"optimizer": 1, "updates": 1})
    trained(model, optimizer, monitor, 1)
    keys = "gradient", "update", "scalars"
    for parameter in model.parameters():
        optimizer.state[parameter] |= {key: torch.full_like(parameter, 1e6) for key in keys}
    trained(model, optimizer, monitor, 3)
    tables = monitor.recording().tables
    assert all((tables[f"optimizer {key}"].column("max_abs") == 1e6).all() for key in keys)
    assert max(tables[kind].column("max_abs").max() for kind in ("gradient", "update")) < 1e3
    assert "scalars" not in tables


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_request_after_a_step_that_failed_waits_for_the_next_step(with_closure: bool) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            loss = None if closure is None else closure()
            if self.fails:
                raise RuntimeError("no memory left")
            super().step()
            return loss

    model = nn.Linear(3, 2)
    optimizer = Failing(model.parameters(), lr=0.1)
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="skip")

    def backward(factor: float = 1.0) -> Tensor:
        loss = backpropagated(optimizer, model(torch.ones(4, 3)).square().mean() * factor)
        monitor.step(loss)
        return loss

    for optimizer.fails in (False, True):
        if not with_closure:
            backward()
        with pytest.raises(RuntimeError, match="no memory") if optimizer.fails else contextlib.nullcontext():
            optimizer.step(backward if with_closure else None)
    optimizer.fails = False
    before = model.weight.detach().clone()
    backward(math.nan)
    optimizer.step()
    assert torch.equal(model.weight, before)
    backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
