"""Inside torch.compile: calls that read numbers on the host break the graph without warnings; operators get loaded."""

from collections.abc import Callable

import pytest
import torch
from helpers.processes import Forks
from torch import Tensor, nn

import gradstat

FIRST_CALLS = """
import os, torch, gradstat

CALLS = {
    "stats": lambda parameters: gradstat.stats([p.grad for p in parameters]),
    "clip_grad_norm_": lambda parameters: gradstat.clip_grad_norm_(parameters, 1.0),
    "get_total_norm": lambda parameters: gradstat.get_total_norm([p.grad for p in parameters]),
    "clip_grads_with_norm_": lambda parameters: gradstat.clip_grads_with_norm_(parameters, 1.0, torch.tensor(2.0)),
}

def compiled(call):
    return torch.compile(call, fullgraph=True, backend="eager")

def outcome(call):
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((4,), 3.0)
    return call(parameters), [parameter.grad for parameter in parameters]

compiled(torch.sin)(torch.ones(1))  # imports the compiler for all of them
for name, call in CALLS.items():
    if os.fork() == 0:
        first = outcome(compiled(call))
        assert str(first) == str(outcome(call)), first
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_the_first_call_of_a_process_may_be_inside_a_graph(forks: Forks) -> None:
    """The libraries are loaded on first use, which in this case is while the graph is traced."""
    ended = forks.run(FIRST_CALLS, warnings="default")
    assert ended.returncode == 0, ended.stderr


class Training:
    """A model, and all calls that a training step may make."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = gradstat.Monitor(self.model, self.optimizer, on_anomaly="record")
        self.clip = gradstat.ZClip()
        self.micro_batches = gradstat.MicroBatches(self.model)


def check(training: Training, loss: Tensor) -> object:
    report = gradstat.check(training.model)
    if not report.ok:
        raise AssertionError(report)
    report.raise_if_nonfinite()
    return report.total_norm, str(report), report["weight"].l2_norm, [stats.name for stats in report.worst(1)]


def monitored(training: Training, loss: Tensor) -> object:
    training.monitor.check_batch({"x": loss})
    return [finding.rule for finding in training.monitor.step(loss)], training.monitor.steps


def accumulated(training: Training, loss: Tensor) -> object:
    training.micro_batches.check()
    report = training.micro_batches.result()
    return report.ok, report.final.total_norm


CALLS: dict[str, Callable[[Training, Tensor], object]] = {
    "check": check,
    "check_async": lambda training, loss: gradstat.check_async(training.model).result().to_dict(),
    "check_tensors": lambda training, loss: gradstat.check_tensors({"loss": loss}).max_abs,
    "monitor": monitored,
    "adaptive clip": lambda training, loss: training.clip.clip_(training.model.parameters()),
    "micro-batches": accumulated,
    "guarded_step": lambda training, loss: gradstat.guarded_step(training.optimizer, 1.0).total_norm,
}


# torch's own warnings: about a loss used after backward(), imports of its optimizers, and Python 3.14.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:'_UnionGenericAlias' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_what_reads_numbers_leaves_the_graph_quietly(call: str) -> None:
    compiled, plain = Training(), Training()

    def step(training: Training, x: Tensor) -> object:
        training.optimizer.zero_grad()
        loss = training.model(x).square().sum()
        loss.backward()
        return CALLS[call](training, loss)

    compiled_step = torch.compile(step, backend="eager")
    for seed in range(3):
        x = torch.full((2, 4), float(seed))
        assert str(compiled_step(compiled, x)) == str(step(plain, x))
