"""Rejects a torch that is too old before any of it is used, instead of failing later with a missing symbol."""

from __future__ import annotations

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("gradstat needs PyTorch, which this Python does not have: pip install torch") from None

LEAST = (2, 10)
"""The oldest supported torch: its release has the stable ABI that the extension needs (setup.py, pyproject.toml)."""


def require(version: str) -> None:
    """Raises `ImportError` with the remedy unless the torch version ``version`` is new enough.

    Only major and minor version count: a pre-release such as 2.10.0a0 is treated as the release.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < LEAST:
        wanted = ".".join(map(str, LEAST))
        raise ImportError(
            f"gradstat needs torch >= {wanted}, found torch {version}. Upgrade it: pip install -U 'torch>={wanted}'"
        )


require(torch.__version__)
