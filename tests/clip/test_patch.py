"""patch_torch: what it replaces, which calls it passes on to torch, and that it leaves no trace."""

import contextlib
import functools
import inspect
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from helpers.devices import parameter_with
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import clip_grad

import gradstat

PLACES = [
    (utils, "clip_grad_norm_"),
    (utils, "get_total_norm"),
    (utils, "clip_grads_with_norm_"),
    (clip_grad, "clip_grad_norm_"),
    (clip_grad, "_get_total_norm"),
    (clip_grad, "_clip_grads_with_norm_"),
]
IDS = [f"{module.__name__}.{name}" for module, name in PLACES]
TORCHS = [getattr(module, name) for module, name in PLACES]


def current() -> list[Any]:
    return [getattr(module, name) for module, name in PLACES]


def is_untouched() -> bool:
    return all(map(operator.is_, current(), TORCHS))


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    yield
    untouched = is_untouched()
    for (module, name), function in zip(PLACES, TORCHS, strict=True):
        setattr(module, name, function)
    assert untouched


def huge() -> nn.Parameter:
    """A parameter whose gradient's norm overflows in torch but not in gradstat."""
    return parameter_with(torch.tensor([3e20, 4e20]))


def is_gradstats(clip: Callable[..., Tensor]) -> bool:
    return bool(clip([huge()], 1.0).isfinite())


CALLS: dict[str, Callable[[nn.Parameter], object]] = {
    "utils.clip_grad_norm_": lambda p: utils.clip_grad_norm_([p], 1.0),
    "clip_grad.clip_grad_norm_": lambda p: clip_grad.clip_grad_norm_(parameters=(p,), max_norm=1.0),
    "deprecated": lambda p: utils.clip_grad_norm(iter([p]), 1.0),  # type: ignore[deprecated]
    "utils.get_total_norm": lambda p: utils.get_total_norm([p.grad]),  # type: ignore[list-item]
    "clip_grad._get_total_norm": lambda p: clip_grad._get_total_norm(tensors=p.grad, norm_type=2.0),  # type: ignore[no-untyped-call]
    # torch does not take a Python number as norm, gradstat does not take a negative limit.
    "utils.clip_grads_with_norm_": lambda p: utils.clip_grads_with_norm_([p], 1.0, total_norm=5e20),  # type: ignore[arg-type]
    "clip_grad._clip_grads_with_norm_": lambda p: clip_grad._clip_grads_with_norm_([p], 1.0, total_norm=5e20),  # type: ignore[arg-type,no-untyped-call]
}


def outcome_of(call: str) -> object:
    parameter = huge()
    try:
        returned = CALLS[call](parameter)
    except (TypeError, ValueError) as error:
        return type(error)
    return returned if isinstance(returned, Tensor) else parameter.grad


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.clip_grad_norm` is now deprecated")
@pytest.mark.parametrize("call", CALLS)
def test_calls_are_gradstats_while_patched_and_torchs_before_and_after(call: str) -> None:
    torchs: object = torch.tensor(math.inf)
    ours: object = torch.tensor(5e20)
    if "_with_norm_" in call:
        torchs, ours = TypeError, torch.tensor([0.6, 0.8])

    def same(found: object, expected: object) -> bool:
        return torch.allclose(found, expected) if isinstance(found, Tensor) else found is expected  # type: ignore[arg-type]

    assert same(outcome_of(call), torchs)
    with contextlib.suppress(KeyError), gradstat.patch_torch():
        assert same(outcome_of(call), ours)
        raise KeyError  # an exception ends the patch, too
    assert same(outcome_of(call), torchs)


def test_a_function_bound_before_is_torchs_and_one_bound_meanwhile_becomes_torchs() -> None:
    norm_before = utils.clip_grad_norm_
    with gradstat.patch_torch():
        bound = utils.clip_grad_norm_
        assert is_gradstats(bound)
        assert is_gradstats(norm_before)  # torch's function, which calls gradstat's halves
    assert not is_gradstats(bound)
    assert not is_gradstats(norm_before)


def test_signatures_and_names_are_torchs_and_a_module_is_refused_with_the_remedy() -> None:
    expected = [(f.__name__, f.__doc__, inspect.signature(f)) for f in current()]
    with gradstat.patch_torch():
        assert [(f.__name__, f.__doc__, inspect.signature(f)) for f in current()] == expected
        with pytest.raises(TypeError, match=r"got Linear; pass \[p\.grad for p in module\.param"):
            utils.get_total_norm(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_an_empty_generator_warns_once_and_points_at_the_caller() -> None:
    with gradstat.patch_torch(), gradstat.patch_torch(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert utils.clip_grad_norm_((p for p in ()), 1.0) == 0.0
        assert utils.get_total_norm(p for p in ()) == 0.0
    words = "`parameters` is an empty generator, no gradient clipping will occur."
    assert [(str(w.message), w.filename) for w in caught] == [(words, __file__)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1)], ids=str)
def test_patches_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    patches = [gradstat.patch_torch() for _ in order]
    for number in order:
        assert is_gradstats(utils.clip_grad_norm_)
        patches[number].remove()
        patches[number].remove()  # a second time does nothing
    assert is_untouched()


@pytest.mark.parametrize(("module", "name"), PLACES, ids=IDS)
def test_someone_elses_patch_is_left_and_named(module: Any, name: str) -> None:
    place = f"{module.__name__}.{name}"
    with warnings.catch_warnings(record=True) as caught, gradstat.patch_torch():
        warnings.simplefilter("always")
        theirs = functools.partial(getattr(module, name))
        setattr(module, name, theirs)
    assert re.search(f"replaced by other code.*: {place}\\. ", str(caught[0].message))
    assert caught[0].filename == __file__
    assert current() == [theirs if key == place else torchs for key, torchs in zip(IDS, TORCHS, strict=True)]
    setattr(module, name, TORCHS[IDS.index(place)])


def test_threads_patch_and_remove_at_once() -> None:
    def is_patched(_: int) -> bool:
        with gradstat.patch_torch():
            return is_gradstats(utils.clip_grad_norm_)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that the threads interleave
    try:
        with ThreadPool(4) as pool:
            assert all(pool.map(is_patched, range(400)))
    finally:
        sys.setswitchinterval(interval)
    assert is_untouched()


def test_other_kinds_of_tensors_are_handed_to_torch() -> None:
    class Sub(Tensor):
        pass

    with gradstat.patch_torch():
        plain, other = huge(), huge()
        other.grad = torch.tensor([3e20, 4e20]).as_subclass(Sub)
        assert utils.get_total_norm([plain.grad, other.grad]) == float("inf")  # type: ignore[list-item]
        assert utils.clip_grad_norm_([plain, other], 1.0) == float("inf")
        with pytest.raises(TypeError, match="clamp"):
            utils.clip_grads_with_norm_([other], 1.0, 2.0)  # type: ignore[arg-type]


def test_a_compiled_function_compiles_torchs_own() -> None:
    with gradstat.patch_torch():
        parameter = huge()

        @torch.compile(fullgraph=True, backend="eager")
        def clip() -> Tensor:
            return utils.clip_grad_norm_([parameter], 1.0, norm_type=3.0)

        assert clip() == float("inf")
