"""`FlightFile`: where a monitor's recordings are written. Once it is made, a failing write cannot end the run."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gradstat._core.files import path_of, try_replacing
from gradstat._core.text import printable
from gradstat._core.warn import warn
from gradstat.recording.file import SUFFIX, save
from gradstat.recording.findings import Finding
from gradstat.recording.recording import Recording

# Errors that may be gone by the time a recording is written.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


class FlightFile:
    """The file at ``path``, and files beside it; without a path, only files in the current folder.

    Raises TypeError, or ValueError if no file can be made there now. A full disk only warns.
    """

    def __init__(self, path: object) -> None:
        self.path: Path | None = None
        self._unnamed = Path(f"incident{SUFFIX}")
        with suppress(OSError):  # the current folder was removed
            self._unnamed = self._unnamed.absolute()
        if path is None:
            return
        try:
            self.path = path_of(path, "save_to").absolute()  # the folder may change before it is written
            try_replacing(self.path)
        except (OSError, ValueError) as error:  # ValueError: a null character
            reason = error.strerror if isinstance(error, OSError) else error
            text = f"save_to: no file can be made at {str(path)!r}: {reason}"
            if not isinstance(error, OSError) or error.errno not in _PASSING:
                raise ValueError(f"{text}. Choose a file in a folder that exists or can be made") from error
            warn(f"{text}. If it still is so later, recordings will not be saved", RuntimeWarning)

    def write(self, make: Callable[[], Recording], path: Path) -> None:
        """Writes the recording that ``make`` makes. Never raises: one that cannot be written costs a warning."""
        try:
            save(make(), path)
        except Exception as error:
            reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            warn(f"the recording {printable(str(path))} could not be saved: {reason}", RuntimeWarning)

    def beside(self, finding: Finding) -> Path:
        """The file for a snapshot of a finding."""
        base = self.path or self._unnamed
        rule = re.sub(r"[^\w.-]+", "_", finding.rule)[:60]  # a user's rule may have any name
        return base.with_name(f"{base.stem}-step{finding.step}-{rule}{SUFFIX}")
