"""Ends monitors that nobody has detached at the end of the program. A forked process does not end its parent's."""

from __future__ import annotations

import atexit
import os
import traceback
import weakref
from typing import Any

# References to all monitors. A set of them, unlike a WeakSet, can be listed while another thread adds one.
_known: set[weakref.ref[Any]] = set()


def remember(monitor: Any) -> None:
    """Ends ``monitor`` at the end of the program if it is still open. Keeps no monitor alive."""
    _known.add(weakref.ref(monitor, _known.discard))


def _all() -> list[Any]:
    return [monitor for reference in list(_known) if (monitor := reference()) is not None]


def are_open() -> int:
    """How many monitors are open."""
    return sum(monitor._is_open for monitor in _all())


@atexit.register
def _end_with_the_program() -> None:
    for monitor in _all():
        if monitor._is_open:
            try:
                monitor._end("the program ended")
            except Exception:  # a warning that a filter raises as an error; the other monitors are ended all the same
                traceback.print_exc()


def _inherit() -> None:
    """A child must not review the steps of its parent, nor overwrite its file, unless it takes steps itself."""
    for monitor in _all():
        monitor._is_open = False
        monitor._renew_lock()  # a thread that does not exist here may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)
