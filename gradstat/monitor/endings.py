"""Ends monitors that nobody has removed at the end of the program. A forked process does not end its parent's."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from typing import Any

from gradstat._core.warn import warn
from gradstat._step import torch_calls
from gradstat.monitor.unwatched import PROPAGATED_ERRORS

# Seconds to wait at the end of the program for a thread that is inside of a monitor.
PATIENCE = 10.0
# References to all monitors. A set of them, unlike a WeakSet, can be listed while another thread adds one.
_known: set[weakref.ref[Any]] = set()


def remember(monitor: Any) -> None:
    """Ends ``monitor`` at the end of the program if it is still open. Keeps no monitor alive."""
    _known.add(weakref.ref(monitor, _known.discard))


def _all() -> list[Any]:
    return [monitor for reference in list(_known) if (monitor := reference()) is not None]


def are_open() -> int:
    """How many monitors are open."""
    return sum(monitor.is_open for monitor in _all())


def end(monitor: Any, why: str) -> None:
    """Reviews what is left and saves the recording. Findings raise nothing any more, but warn."""
    monitor.is_open = False
    torch_calls.end_seeking(monitor)
    if not monitor.lock.acquire(timeout=PATIENCE):
        warn("the last steps were not reviewed: another thread is inside of the monitor", RuntimeWarning)
        return
    try:
        monitor.reviewer.without_ranks()
        monitor.reviewer.catch_up()
        monitor.reviewer.review_end()
    except PROPAGATED_ERRORS as error:
        warn(f"the last steps could not be read: {error}", RuntimeWarning)
    finally:
        monitor.lock.release()
    if monitor.steps or monitor.findings or monitor.is_removed:
        monitor.responder.save(why)
    monitor.responder.respond_at_end(monitor)


@atexit.register
def _end_with_the_program() -> None:
    for monitor in _all():
        if monitor.is_open:
            monitor.reviewer.note_error(getattr(sys, "last_value", None))  # that nobody has caught
            try:
                end(monitor, "the program ended")
            except Exception:  # a warning that a filter raises as an error; the other monitors are ended all the same
                traceback.print_exc()


def _inherit() -> None:
    """A child must not review the steps of its parent, nor overwrite its file, unless it takes steps itself."""
    for monitor in _all():
        monitor.is_open = False
        monitor.lock = threading.RLock()  # a thread that does not exist here may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)
