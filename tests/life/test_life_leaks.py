"""Steps do not leak objects or tensors in hundreds of steps, or memory in thousands; `make leaks` runs more steps."""

import functools

import leaks
import pytest
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


@functools.cache
def growth() -> dict[str, tuple[int, int]]:
    """For each kind of step, the objects and tensors left behind by 160 of them, or 800."""
    lines = [line.split("|") for line in output_of(GROWTH).splitlines()]
    return {kind: (int(objects), int(tensors)) for kind, objects, tensors in lines}


def test_steps_leave_nothing_behind() -> None:
    assert [kind for kind in growth() if kind != "kept" and "memory" not in kind] == list(leaks.KINDS)
    assert not {kind for kind in leaks.KINDS if growth()[kind][0] > 10 or growth()[kind][1] > 0}


@pytest.mark.parametrize("kind", ["check", "clip_grad_norm_", "guarded_step"])
def test_thousands_of_steps_take_no_more_memory(kind: str) -> None:
    assert growth()[f"memory of {kind}"][0] < 1 << 19


def test_growth_is_detected() -> None:
    assert growth()["kept"][0] >= 150
