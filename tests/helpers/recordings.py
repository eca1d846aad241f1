"""Recordings for tests: random ones, ones with an incident, and hostile names."""

import io
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import torch

from gradstat.monitor import Finding, Recording, Series
from gradstat.recording import COLUMNS

HOSTILE = (
    "</script><script>window.harmed = 1</script>",
    '<img src=x onerror="window.harmed = 1">',
    "\"'`;&lt;<b>bold</b><a href='javascript:window.harmed=1'>a</a>",
    "größe.重み.\N{PILE OF POO}\u2028\u2029\x00\n",
    "__proto__",
    "",
)


def series(n: int, steps: np.ndarray, seed: int = 0, names: tuple[str, ...] = ()) -> Series:
    """Plausible statistics of ``n`` tensors, the first ones named ``names``."""
    rng = np.random.default_rng(seed)
    m = len(steps)
    scale = 10.0 ** rng.uniform(-4, 1, n) * np.exp(0.1 * rng.standard_normal((m, n)).cumsum(0))
    numel = rng.integers(1, 10**6, n)
    columns = {
        "l2_norm": scale * np.sqrt(numel),
        "mean": scale * rng.standard_normal((m, n)) * 0.01,
        "std": scale,
        "min": -scale * rng.uniform(3, 5, (m, n)),
        "max": scale * rng.uniform(3, 5, (m, n)),
        "zero_fraction": rng.uniform(0, 1, (m, n)) * (rng.random(n) < 0.3),
        "nan_count": np.zeros((m, n)),
        "inf_count": np.zeros((m, n)),
    }
    values = np.stack([columns[name] for name in COLUMNS], -1).astype(np.float32)
    layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    made = (f"blocks.{i // 8}.{layers[i // 2 % 4]}.{('weight', 'bias')[i % 2]}" for i in range(n))
    return Series(tuple([*names, *made][:n]), numel, steps, values)


def spoil(table: Series, i: int, j: int, nan: int = 0, inf: int = 0) -> None:
    """Gives tensor ``j`` nonfinite elements in its ``i``-th measurement."""
    table.column("nan_count")[i, j], table.column("inf_count")[i, j] = nan, inf


def recording(
    m: int = 40, n: int = 24, *, start: int = 0, seed: int = 0, incident: int | None = 30, names: tuple[str, ...] = ()
) -> Recording:
    """A run of ``m`` steps. In step ``incident`` of it a gradient has NaN and Inf, and the loss is NaN."""
    rng = np.random.default_rng(seed + 1)
    steps = np.arange(start, start + m)
    gradient = series(n, steps, seed, names)
    now_and_then = series(n, steps[::5], seed + 1, names)
    norm = np.sqrt((gradient.column("l2_norm").astype(np.float64) ** 2).sum(1))
    scalars = {
        "norm": norm.copy(),
        "finite_norm": norm,
        "nonfinite": np.zeros(m),
        "missing": np.zeros(m),
        "loss": 4.0 * np.exp(-np.arange(m) / 30) + 0.05 * rng.standard_normal(m),
        "lr": 1e-3 * np.minimum(1.0, (np.arange(m) + 1) / 10),
        "loss_scale": np.full(m, 65536.0),
    }
    findings: tuple[Finding, ...] = ()
    if incident is not None:
        culprit = n // 2
        spoil(gradient, incident, culprit, nan=7, inf=2)
        if n > 3:
            gradient.values[:, 1] = np.nan  # a tensor without any measurement
        scalars["norm"][incident] = math.nan
        scalars["nonfinite"][incident] = 9
        scalars["loss"][incident] = math.nan
        scalars["loss_nonfinite"] = np.where(np.arange(m) == incident, 1.0, math.nan)  # noted in bad steps only
        name = gradient.names[culprit]
        findings = (
            Finding("loss-spike", "warning", start + incident + 4, "loss", {"ratio": 3.2}, text="The loss tripled."),
            Finding(
                "nonfinite-gradient",
                "error",
                start + incident,
                name,
                {"nan_count": 7, "largest": math.inf, "before": math.nan, "low": -math.inf},
                ("an overflow in the forward pass", "a bad sample"),
                ("lower the learning rate",),
                f"The gradient of {name} has 7 NaN and 2 Inf.",
                "gradient",
            ),
        )
    return Recording(
        steps,
        scalars,
        {"gradient": gradient, "parameter": now_and_then},
        findings,
        tuple(reversed(gradient.names)),
        {"model": "GPT", "torch": "2.13.0", "why": "an incident", "nested": {"nan": math.nan, "list": [1, 2.5, None]}},
    )


def bits(value: object) -> object:
    """A value that is equal only if all items of ``value`` are equal, in order, and arrays are equal bitwise."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, (Recording, Series)):
        return bits(vars(value))
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value)  # NaN is not equal to itself, but its repr is


def assert_same(a: Recording, b: Recording) -> None:
    """Checks that two recordings are bitwise equal."""
    assert bits(a) == bits(b)


def npy(array: np.ndarray) -> bytes:
    """The array as an ``.npy`` file; object arrays are pickled."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=array.dtype.hasobject)
    return file.getvalue()


def rewritten(path: Path, members: dict[str, bytes] | None = None, *, method: int = 8, **changed: object) -> Path:
    """A copy of a recording with some ``members`` replaced, compressed by ``method``, and header fields ``changed``."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    held["header.json"] = json.dumps({**json.loads(held["header.json"]), **changed}).encode()
    copy = path.with_name("rewritten.gradstat")
    with zipfile.ZipFile(copy, "w", method) as archive:
        for name, data in {**held, **(members or {})}.items():
            archive.writestr(name, data)
    return copy
