"""Steps do not leak objects or tensors in hundreds of steps, or memory in thousands; `make leaks` runs more steps."""

import leaks
from helpers.processes import output_of

# In a separate process, since other tests' objects come and go in this one. A monitor holds the steps since its last
# review, and those around a bad one. Reviews come after measurements of weights, every 50 steps, and bad steps come
# every 160: after a multiple of both it holds equally many.
GROWTH = """
import gc, leaks, torch

torch.set_num_threads(1)
torch.manual_seed(0)  # with some inputs there is a first finding between measurements, which fills caches of types
for make, *_ in leaks.KINDS.values():
    make()()
gc.collect()
gc.freeze()  # what is imported, also by first steps, is not looked through each time
kept, check = [], leaks.KINDS["check"][0]()
leaks.KINDS["kept"] = (lambda: lambda: kept.append([check()]), 10, 1)
for kind in leaks.KINDS:
    steps = 800 if kind == "Monitor.step" else 160
    grown = leaks.growth(kind, steps, steps)
    print(kind, grown.objects, grown.tensors, sep="|")
for kind in ("check", "clip_grad_norm_", "guarded_step"):  # what C++ code keeps is no object
    print(f"memory of {kind}", leaks.growth(kind, 4000).resident, 0, sep="|")
"""


def test_steps_leave_nothing_behind() -> None:
    """Neither objects, tensors nor memory of the library; what a program keeps is seen."""
    lines = [line.split("|") for line in output_of(GROWTH).splitlines()]
    grown = {kind: (int(objects), int(tensors)) for kind, objects, tensors in lines}
    kept = grown.pop("kept")
    memory = {kind: grown.pop(kind)[0] for kind in list(grown) if "memory" in kind}
    assert list(grown) == list(leaks.KINDS)
    assert not {kind: numbers for kind, numbers in grown.items() if numbers[0] > 10 or numbers[1] > 0}
    assert len(memory) == 3
    assert not {kind: size for kind, size in memory.items() if size >= 1 << 19}
    assert kept[0] >= 150
