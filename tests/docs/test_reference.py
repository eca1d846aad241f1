"""Every public name has a docstring, its members too, and a place in the reference, which `make docs` makes of both."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.frameworks import OF_FRAMEWORKS
from public_names import public_names

pytestmark = OF_FRAMEWORKS
PUBLIC = public_names()
PAGES = (Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md")
# What the pages describe; with brackets, what gradstat alone makes, which is shown without arguments.
DIRECTIVE = re.compile(r"^(?:\.\. auto\w+::|:::\{py:data\}) ([\w.]+)(\(\))?$", re.MULTILINE)
PLACES = [place for page in PAGES for place in DIRECTIVE.findall(page.read_text())]


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
    assert callable(function)
    arguments = [
        name for name in inspect.signature(function).parameters if name not in ("self", "cls", "args", "kwargs")
    ]
    missing = [name for name in arguments if not re.search(rf"\b{name}\b", text)]
    assert not missing or re.search(r"(?i)\bas there\b|\bas torch's|inverse of", text), missing
