"""Adding a field: the recipe of CONTRIBUTING.md, carried out on a copy of the sources, one field for each merge.

The copy adds only their definitions and their lifts in the reference; merging, reductions over ranks, reports and the
monitor's history have to follow without further changes.
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
        got = table[:, _fields.INDEX[name]]
        assert got.tolist() == [value(tensor).item() for tensor in tensors], name


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(module, inputs):
    module(inputs).square().sum().backward()
    return module


def rank(number, store, world):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=world)
    inputs = torch.ones(2, 5)
    whole = [p.grad for p in backward(model(), inputs).parameters()]
    sharded = backward(fully_shard(model(), mesh=init_device_mesh("cpu", (world,))), inputs)
    report = gradstat.check(sharded)
    table, total = torch.tensor(report._table), torch.tensor(report._row)
    for name, value in VALUES.items():
        column = _fields.INDEX[name]
        torch.testing.assert_close(table[:, column], torch.stack([value(g).double() for g in whole]))
        torch.testing.assert_close(total[column], value(torch.cat([g.flatten() for g in whole])).double())
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
    report = gradstat.check_tensors(tensors)
    expect(np.array(report._row.tolist())[None], everything)

    seen = []

    class Rule(gradstat.monitor.Rule):
        name = "sees"

        def review(self, window):
            seen.append(window.rows("gradient"))
            return []

    plain = backward(model(), torch.ones(2, 5))
    monitor = gradstat.Monitor(plain, rules=[Rule()])
    monitor.step()
    monitor.flush()
    expect(seen[0].raw[0], [p.grad for p in plain.parameters()])
    print("done")
"""


def test_a_field_of_each_merge_goes_through_everything(tmp_path: Path) -> None:
    for folder in ("gradstat", "kernels", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    definition, reference = tmp_path / "gradstat" / "_fields.py", tmp_path / "gradstat" / "_core" / "reference.py"
    text, lifts = definition.read_text(), reference.read_text()
    for name, (merge, line, lift) in FIELDS.items():
        # Summed fields are inserted before the others; the rest is appended.
        before = '    Field("min", "min"' if merge == "sum" else ")\n\nNAMES:"
        assert text.count(before) == 1
        text = text.replace(before, f"    {line}\n{before}")
        lifts = lifts.replace("    fields = {\n", f'    fields = {{\n        "{name}": {lift},\n')
    definition.write_text(text)
    reference.write_text(lifts)
    subprocess.run([sys.executable, definition, "--write"], check=True, capture_output=True)
    assert "GRADSTAT_FIELD(max_odd," in (tmp_path / "csrc" / "stat_fields.def").read_text()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GRADSTAT_BACKEND": "reference"}
    command = [sys.executable, program, str(tmp_path / "store")]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n")
