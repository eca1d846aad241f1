"""The public names: those in `__all__` of modules whose path has no leading underscore, as in docs/project.md."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import gradstat

CONSTANTS = (bool, int, float, str, tuple, dict, frozenset)


def public_modules() -> Iterator[ModuleType]:
    """gradstat and its public modules."""
    yield gradstat
    for found in pkgutil.walk_packages(gradstat.__path__, "gradstat."):
        if not any(part.startswith("_") for part in found.name.split(".")) and ".kernels" not in found.name:
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__"):
                yield module


def public_names() -> dict[object, set[str]]:
    """The names of each public object: a class may be exported by several modules.

    The key of a constant is its last name, since equal constants are different things.
    """
    names: dict[object, set[str]] = {}
    for module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            key = f"constant {name}" if isinstance(thing, CONSTANTS) else thing
            names.setdefault(key, set()).add(f"{module.__name__}.{name}")
    return names
