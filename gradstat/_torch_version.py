"""Refuses a torch that is too old before any of it is used, so that nobody meets a missing symbol instead."""

from __future__ import annotations

import torch

LEAST = (2, 10)
"""The oldest torch: the release whose stable ABI the compiled extension asks for (setup.py, pyproject.toml)."""


def require(found: str) -> None:
    """Raises `ImportError` with the remedy unless the torch release ``found`` is new enough.

    Only major and minor count: builds of a release before it is out, such as 2.10.0a0, are taken at their word.
    """
    major, minor = found.split(".")[:2]
    if (int(major), int(minor)) < LEAST:
        wanted = ".".join(map(str, LEAST))
        raise ImportError(
            f"gradstat needs torch >= {wanted}, found torch {found}. Upgrade it: pip install -U 'torch>={wanted}'"
        )


require(torch.__version__)
