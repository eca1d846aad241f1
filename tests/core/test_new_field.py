"""Adding a field: the recipe of CONTRIBUTING.md, carried out on copies of the sources.

One field for each merge goes through the reference alone: merging, reductions over ranks, reports and the monitor's
history have to follow without further changes. Sums go through the compiled loops and Triton's.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FIELDS = {
    "positive_count": ("sum", 'Field("positive_count", "sum", 0, "finite elements above zero"),', "(finite > 0).sum()"),
    "min_abs": ("min", 'Field("min_abs", "min", 1, "smallest magnitude"),', "_smallest(finite.abs())"),
    "max_odd": ("max", 'Field("max_odd", "max", 1, "largest magnitude, once more"),', "-_smallest(-finite.abs())"),
}

PROGRAM = """
import os
import sys
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradstat
from gradstat import _fields

VALUES = {
    "positive_count": lambda t: (t > 0).sum(), "min_abs": lambda t: t.abs().min(), "max_odd": lambda t: t.abs().max()
}


def expect(table, tensors):
    for name, value in VALUES.items():
        expected = torch.stack([value(tensor).double() for tensor in tensors])
        torch.testing.assert_close(torch.as_tensor(table)[:, _fields.INDEX[name]], expected)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(module):
    module(torch.ones(2, 5)).square().sum().backward()
    return module


def rank(number, store, world):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=world)
    whole = [p.grad for p in backward(model()).parameters()]
    sharded = backward(fully_shard(model(), mesh=init_device_mesh("cpu", (world,))))
    report = gradstat.check(sharded)
    expect(report._table, whole)
    expect(report._row[None], [torch.cat([g.flatten() for g in whole])])
    assert gradstat.stats([p.grad for p in sharded.parameters()]).shape == (4, len(_fields.FIELDS))
    dist.barrier()  # whoever leaves first would end the others' connections
    os._exit(0)  # gloo's threads may abort a process that is ending


if __name__ == "__main__":
    # Forked before anything starts a thread: importing torch once more takes seconds for each.
    mp.start_processes(rank, (sys.argv[1], 2), nprocs=2, start_method="fork")
    tensors = [torch.randn(50), torch.randn(3, 4)]
    table = gradstat.stats(tensors)
    expect(table, tensors)
    everything = [torch.cat([t.flatten() for t in tensors])]
    expect(_fields.merge(torch, table)[None], everything)
    expect(_fields.merge(np, table.numpy())[None], everything)
    expect(gradstat.check_tensors(tensors)._row[None], everything)

    seen = []

    class Rule(gradstat.monitor.Rule):
        name = "sees"

        def review(self, window):
            seen.append(window.rows("gradient"))
            return []

    plain = backward(model())
    monitor = gradstat.Monitor(plain, rules=[Rule()])
    monitor.step()
    monitor.flush()
    expect(seen[0].raw[0], [p.grad for p in plain.parameters()])
    print("done")
"""


def copied(to: Path, *folders: str) -> None:
    for folder in folders:
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=shutil.ignore_patterns("*.so", "*.pyc"))


def replace(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


def define(root: Path, fields: dict[str, tuple[str, str, str]]) -> None:
    """Adds fields to the definition, summed ones before the others, and to the reference."""
    for name, (merge, line, lift) in fields.items():
        before = '    Field("min", "min"' if merge == "sum" else ")\n\nNAMES:"
        replace(root / "gradstat" / "_fields.py", {before: f"    {line}\n{before}"})
        before = "    fields = {\n"
        replace(root / "gradstat" / "_core" / "reference.py", {before: f'{before}        "{name}": {lift},\n'})
    command = [sys.executable, root / "tools" / "fields.py", "--write"]
    subprocess.run(command, check=True, capture_output=True)
    assert all(f"GRADSTAT_FIELD({name}," in (root / "csrc" / "stat_fields.def").read_text() for name in fields)


def run(command: list[str | Path], root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT / 'tests'}", **environment}
    return subprocess.run(command, env=variables, cwd=root, capture_output=True, text=True, check=False)


def test_a_field_of_each_merge_goes_through_everything(tmp_path: Path) -> None:
    copied(tmp_path, "gradstat", "kernels", "csrc", "tools")
    define(tmp_path, FIELDS)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = run([sys.executable, program, tmp_path / "store"], tmp_path, GRADSTAT_BACKEND="reference")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n")


# One sum whose terms are exact in float32, and one whose terms are rounded and leave out what its squares cannot hold.
SUMS = {
    "abs_sum": ("sum", 'Field("abs_sum", "sum", 1, "magnitudes"),', "magnitude.sum()"),
    "third_sum": (
        "sum",
        'Field("third_sum", "sum", 2, "a third of the squares of ordinary elements"),',
        "torch.where(large | small, 0.0, finite).square().sum() / 3",
    ),
}
LIFTS = """
struct abs_sum {
  static constexpr bool kIsExact = true;
  template <class Real>
  GRADSTAT_LIFT static Real of(Real x, Real) {
    return absolute(x);
  }
  template <class Real>
  GRADSTAT_LIFT static Real add(Real sum, Real x) {
    return sum + absolute(x);
  }
};

struct third_sum {
  static constexpr bool kIsExact = false;
  template <class Real>
  GRADSTAT_LIFT static Real of(Real, Real ordinary) {
    return ordinary * ordinary * (1.0f / 3);
  }
  template <class Real>
  GRADSTAT_LIFT static Real add(Real sum, Real x) {
    return sum + of(x, x);
  }
};
"""
NAMED = {"EACH(sq_sum) EACH(sum)": "EACH(sq_sum) EACH(sum) EACH(abs_sum) EACH(third_sum)"}

COMPILED = """
import os
import sys
import numpy as np
import torch
from helpers.exact import COMPLEX, FLOAT8, REAL, exact_stats_of

import gradstat
from gradstat import _fields

THIRD = float(np.float32(1) / np.float32(3))


def filled(dtype, size, number):
    # Values, and those of which the squares are ordinary.
    is_wide = dtype in (torch.float64, torch.complex128)
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(size, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    ordinary = values
    if number % 3 == 1 and dtype not in FLOAT8:  # float32 cannot hold the squares, for wide types float64 cannot
        ordinary = values.clone()
        values[::5] *= 1e200 if is_wide else 1e25
        ordinary[::5] = 0.0 if is_wide else values[::5]
    if number % 3 == 2:
        values[::7] = 0
        values[1::50] = torch.inf
        values[2::90] = torch.nan
    return values.to(dtype), ordinary.to(dtype)


def expected(dtypes, sizes):
    pairs = [filled(dtype, size, i + j) for i, dtype in enumerate(dtypes) for j, size in enumerate(sizes)]
    tensors = [values for values, _ in pairs]
    thirds = [THIRD * exact_stats_of(ordinary).squares for _, ordinary in pairs]
    exact = [{"abs_sum": exact_stats_of(t).magnitudes, "third_sum": third} for t, third in zip(tensors, thirds)]
    return tensors, gradstat.stats(tensors, backend="reference"), exact


def check(backend, tensors, reference, exact):
    table = gradstat.stats(tensors, backend=backend)
    for i, tensor in enumerate(tensors):
        for name, value in exact[i].items():
            got = table[i, _fields.INDEX[name]].item()
            assert abs(got - value) <= 3e-7 * value, (backend, tensor.dtype, len(tensor), name, got, value)
    others = [i for i, name in enumerate(_fields.NAMES) if name not in (*exact[0], "sum")]
    torch.testing.assert_close(table[:, others], reference[:, others], rtol=2e-7, atol=0)


if __name__ == "__main__":
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork would wait for others
    given = expected([*REAL, *FLOAT8, *COMPLEX], (0, 1, 7, 64, 300, 5000, 70_001))
    # Each in a process of its own, as the instructions are chosen once per process.
    for instructions in ("baseline", "avx2", "avx512", ""):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(threads)
            os.environ["GRADSTAT_CPU_INSTRUCTIONS"] = instructions
            try:
                gradstat.stats([torch.ones(1)], backend="native")
            except RuntimeError as error:
                assert "is not available on this machine" in str(error)
                os._exit(0)
            check("native", *given)
            print(instructions or "default", flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, instructions
    check("triton", *expected([torch.float32, torch.bfloat16, torch.float64], (300, 2500)))
    print("triton")
"""


def test_sums_go_through_all_loops_and_do_not_compile_without_a_lift(tmp_path: Path) -> None:
    copied(tmp_path, "gradstat", "kernels", "csrc", "tools")
    define(tmp_path, SUMS)
    syntax: list[str | Path] = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", tmp_path / "csrc" / "stat.h"]
    assert "a field is in neither or both of GRADSTAT_SUMS and GRADSTAT_NOT_SUMS" in run(syntax, tmp_path).stderr
    replace(tmp_path / "csrc" / "lift.h", NAMED)
    assert "'gradstat::lifts::abs_sum' has not been declared" in run(syntax, tmp_path, LC_ALL="C").stderr
    imported = run([sys.executable, "-c", "from gradstat.kernels import stats"], tmp_path, TRITON_INTERPRET="1")
    assert 'AssertionError: a field has no lift here: CONTRIBUTING.md, "Add a field"' in imported.stderr
    replace(tmp_path / "csrc" / "lift.h", {"namespace lifts {\n": f"namespace lifts {{\n{LIFTS}"})
    replace(
        tmp_path / "kernels" / "stats.py",
        {
            '_SUMMED = ("sq_sum", "sum")': '_SUMMED = ("sq_sum", "sum", "abs_sum", "third_sum")',
            "return ordinary * ordinary, x": "return ordinary * ordinary, x, tl.abs(x), ordinary * ordinary / 3",
        },
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    # Not optimized, as that takes most of the time.
    build = {"GRADSTAT_CUDA": "0", "GRADSTAT_INSTRUMENTATION": "-O0", "GRADSTAT_WERROR": "1"}
    built = run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], tmp_path, **build)
    assert built.returncode == 0, built.stderr
    program = tmp_path / "program.py"
    program.write_text(COMPILED)
    ran = run([sys.executable, program], tmp_path, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr
    assert {"baseline", "default", "triton"} <= set(ran.stdout.split())
