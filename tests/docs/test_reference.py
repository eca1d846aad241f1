"""Every public name has a docstring, its members too, and a place in the reference, which `make docs` makes of both."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.frameworks import OF_FRAMEWORKS, QUIET
from public_names import public_names

pytestmark = OF_FRAMEWORKS
PUBLIC = public_names()
PAGES = (Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md")
# What the pages describe; with brackets, what gradstat alone makes, which is shown without arguments.
DIRECTIVE = re.compile(r"^(?:\.\. auto\w+::|:::\{py:data\}) ([\w.]+)(\(\))?$", re.MULTILINE)
MODULE = re.compile(r"^\.\. automodule:: ([\w.]+)\n(?:   .*\n)*   :members:$", re.MULTILINE)


def places_in(page: str) -> Iterator[tuple[str, str]]:
    """The names that a page describes, and the brackets behind them."""
    yield from DIRECTIVE.findall(MODULE.sub("", page))
    for module in MODULE.findall(page):
        yield from ((f"{module}.{name}", "") for name in importlib.import_module(module).__all__)


PLACES = [place for page in PAGES for place in places_in(page.read_text())]


def test_every_public_name_is_in_the_reference_once() -> None:
    placed = [name for name, _ in PLACES]
    counts = {min(names): sum(map(placed.count, names)) for names in PUBLIC.values()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert len(set(placed)) == len(placed)


def described(thing: object) -> bool:
    """Whether it has a docstring of its own, and not one that a dataclass or a base class left there."""
    doc = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return bool(doc) and not re.match(r"\w+\(.*\)$|Alias for field number|Create and return|Initialize self", doc)


def members(kind: type) -> Iterator[tuple[str, Any, bool]]:
    """What gradstat defines under a public name: that, the member, and whether it is part of an integration."""
    for base in kind.__mro__:
        if base.__module__.startswith("gradstat"):
            for name, member in vars(base).items():
                if not name.startswith("_"):
                    yield name, member, "integrations" in base.__module__


def is_described(kind: type, name: str) -> bool:
    """Whether one of that name, in the class or a base, has a docstring, or the class's docstring lists it."""
    listed = re.search(rf"^\s*[\w, ]*\b{name}\b.*:", inspect.getdoc(kind) or "", re.MULTILINE)
    return bool(listed) or any(described(vars(base).get(name)) for base in kind.__mro__)


# Constants, whose keys are strings, are described where the reference lists them.
@pytest.mark.parametrize(
    "thing", [pytest.param(thing, id=min(names)) for thing, names in PUBLIC.items() if not isinstance(thing, str)]
)
def test_every_public_thing_has_a_docstring(thing: object) -> None:
    assert described(thing)
    if isinstance(thing, type):
        found = [name for name, member, _ in members(thing) if callable(member) or hasattr(member, "__get__")]
        assert all(is_described(thing, name) for name in found), found


NOT_CALLED = {name.rpartition(".")[2] for name, brackets in PLACES if brackets}
# What frameworks call, with arguments of theirs.
HOOK = re.compile(r"on_|load_state_dict$|setup$|teardown$|begin|before_|after_|stops$|save$")


def callables(thing: object, name: str) -> Iterator[tuple[str, object, str]]:
    """Public functions and methods: name, the thing itself, and the docstrings that describe its arguments."""
    if not isinstance(thing, type):
        if callable(thing):
            yield name, thing, inspect.getdoc(thing) or ""
        return
    if name.rpartition(".")[2] not in NOT_CALLED and thing.__init__ is not object.__init__:
        yield name, thing.__init__, f"{inspect.getdoc(thing)} {inspect.getdoc(thing.__init__)}"
    for key, member, is_of_integration in members(thing):
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and not (is_of_integration and HOOK.match(key)):
            yield f"{name}.{key}", function, inspect.getdoc(getattr(thing, key)) or ""


DESCRIBED = {
    function: pytest.param(function, text, id=name)
    for thing, names in PUBLIC.items()
    for name, function, text in callables(thing, min(names, key=len))
}


@pytest.mark.parametrize(("function", "text"), DESCRIBED.values())
def test_every_argument_is_described(function: object, text: str) -> None:
    arguments = [
        name for name in inspect.signature(function).parameters if name not in ("self", "cls", "args", "kwargs")
    ]
    missing = [name for name in arguments if not re.search(rf"\b{name}\b", text)]
    assert not missing or re.search(r"(?i)\bas there\b|\bas torch's|inverse of", text), missing


# Names in backticks ---------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "gradstat").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
NAME = r"([A-Za-z_][\w.]*\w)(?:\([^`]*\))?"
IN_PAGES = re.compile(rf"(?<![\w`])`{NAME}`(?!`)")
IN_DOCSTRINGS = re.compile(rf"{IN_PAGES.pattern}|``{NAME}``")
# Names of other packages and programs, and of the environment.
FOREIGN = set(
    re.findall(
        r"\S+",
        """
        _fused_sgd acos backoff_factor captureWarnings DebugUnderflowOverflow defaultplusplus EarlyStopping
        external_lib fnuz fsdp2_clip_grad_norm_ fsdp_utils FSDPEngine G get_grad_norm GRADSTAT_CUDA_ARCHITECTURES
        GRADSTAT_WERROR growth_factor hash_tensor K la_constants log_freq MAJOR MAX_JOBS min_epochs min_steps MINOR
        multi_tensor_l2norm N NativeScaler ncu NestedTensor optimizer_step padding_idx PATCH prepare_grads pretrain
        record_stream r² s0 set_flush_denormal setup_model_and_optimizer SkipStepOptimizer SpikeDetection update_actor
        verl
        """,
    )
)


def names_used(source: str) -> set[str]:
    """The words of Python code, without its docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return set(re.findall(r"\w+", ast.unparse(tree)))


def stale(names: Iterable[str], known: set[str]) -> set[str]:
    """Those that have a part which is not known; a name that ends like one of a file is of `test_documents`."""
    files = (".py", ".md", ".h", ".gradstat", ".html", ".toml")
    return {name for name in names if not name.endswith(files) and not known.issuperset(name.split("."))}


def test_names_in_backticks_exist() -> None:
    """A name that has left the code stands in no docstring and on no page."""
    code = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    known = set().union(*(names_used(path.read_text()) for path in code), (path.stem for path in code), FOREIGN)
    for header in [*(ROOT / "csrc").iterdir()]:
        known |= set(re.findall(r"\w+", header.read_text()))
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                names = {one or two for one, two in IN_DOCSTRINGS.findall(ast.get_docstring(node) or "")}
                found[f"{path.name}: {getattr(node, 'name', '')}"] = stale(names, known)
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        found[page.name] = stale(IN_PAGES.findall(text), known)
    assert {place: names for place, names in found.items() if names} == {}


# The examples in docstrings run; what one takes for granted stands in `TAKEN_FOR_GRANTED` --------------------


TRAINING = """
import itertools
import math
import torch
import gradstat
from torch import nn
from gradstat import *
from gradstat.monitor import *
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = nn.functional.mse_loss
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
loss_of(model(batches[0][0]), batches[0][1]).backward()
"""
TAKEN_FOR_GRANTED = {
    "gradstat.adaptive.AdaptiveClip": "",
    "gradstat.SpikeGuard": "loss = model(batches[0][0]).mean()\nloss.backward()",
    "gradstat.patch_torch": """
torchs = torch.nn.utils.clip_grad_norm_
def train():
    assert torch.nn.utils.clip_grad_norm_ is not torchs
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "gradstat.auto": "",
    "gradstat.integrations.loggers.ReportLogger": """
from torch.utils.tensorboard import SummaryWriter
monitor, loss = Monitor(model), 1.0
writer = SummaryWriter()
SummaryWriter = lambda: writer
""",
    "gradstat.integrations.accelerate.install": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(batches)
""",
    "gradstat.integrations.lightning.GradstatCallback": """
import functools
from lightning import Trainer
Trainer = functools.partial(Trainer, accelerator="cpu", logger=False, enable_checkpointing=False)
""",
    "gradstat.integrations.transformers.install": """
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}
model = Model()
dataset = [{"x": x, "labels": y} for x, y in zip(torch.randn(8, 4), torch.randn(8, 1))]
args = TrainingArguments("out", use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True)
""",
    "gradstat.LowPrecision": """
def train(model):
    for inputs, targets in batches:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
""",
    "gradstat.Monitor": "",
    "gradstat.monitor.rule": "",
    "gradstat.monitor.Schedule": "loader = [x for x, _ in batches]",
    "gradstat.replay.StepStateKeeper": """
loader = [x for x, _ in batches]
def train_step(batch):
    loss = model(batch).mean()
    loss.backward()
    return loss.item()
""",
    "gradstat.monitor.assert_healthy": """
def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
def made_small():
    return model, optimizer, itertools.cycle(batches)
""",
    "gradstat.MicroBatches": """
steps, accumulated = 2, 3
next_micro_batches = lambda: batches
loss = loss_of
""",
    "gradstat.distributed.track_origin": """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp_model = nn.parallel.DistributedDataParallel(model)
""",
    "gradstat.distributed.audit_norm": """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
loss = loss_of(model(batches[1][0]), batches[1][1])
the_frameworks_clip = lambda model, max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
""",
}
# What is done behind an example, whatever became of it: what it defines is called, what began is ended.
AFTERWARDS = {
    "gradstat.monitor.assert_healthy": "test_training(assert_healthy)",
    "gradstat.integrations.loggers.ReportLogger": "writer.close()",
    "gradstat.distributed.track_origin": "dist.destroy_process_group()",
    "gradstat.distributed.audit_norm": "dist.destroy_process_group()",
}


def examples_in(text: str) -> Iterator[str]:
    """Indented blocks behind a line that ends with ``::``, and what stands behind ``>>>`` and ``...``."""
    for block in re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", text + "\n"):
        yield textwrap.dedent(block)
    prompted = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE)
    if prompted:
        yield "\n".join(prompted) + "\n"


@functools.cache  # and not at import: pytest wants to import gradstat's plugin itself
def examples() -> dict[str, list[str]]:
    """By the shortest name of what they belong to."""
    things = {min(names, key=len): thing for thing, names in public_names().items() if not isinstance(thing, str)}
    found = {name: list(examples_in(inspect.getdoc(thing) or "")) for name, thing in things.items()}
    return {name: listed for name, listed in found.items() if listed}


def test_what_is_taken_for_granted_belongs_to_an_example() -> None:
    assert examples().keys() == TAKEN_FOR_GRANTED.keys()


@QUIET  # three steps of noise are what they are
@pytest.mark.parametrize("name", TAKEN_FOR_GRANTED)
def test_the_examples_of_a_docstring_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, _, own = name.rpartition(".")
    names: dict[str, object] = {"__name__": "example", own: getattr(importlib.import_module(module), own)}
    exec(TRAINING + TAKEN_FOR_GRANTED[name], names)
    try:
        for example in examples()[name]:
            exec(compile(example, f"an example of {name}", "exec"), names)
    finally:
        exec(AFTERWARDS.get(name, ""), names)
