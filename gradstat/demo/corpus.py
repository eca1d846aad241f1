"""A text corpus that every Python installation has: the sources of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library() -> Path:
    """The folder of the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def read(folder: Path, limit: int = 4_000_000) -> Tensor:
    """The ``.py`` files in ``folder``, except tests and installed packages, concatenated in order of their names.

    At most ``limit`` bytes, as ``[bytes]`` uint8; raises FileNotFoundError if there are fewer than 10,000.
    """
    passed_over = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if passed_over.isdisjoint(path.relative_to(folder).parts):
            try:
                text += path.read_bytes()
            except OSError:  # a dangling link, or a file this user may not read
                continue
            if len(text) >= limit:
                break
    if len(text) < 10_000:
        raise FileNotFoundError(
            f"found {len(text)} bytes of Python sources under {folder}; the demo trains on the standard library's "
            "sources, which this Python was installed without"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(corpus: Tensor, count: int, length: int, generator: torch.Generator, device: torch.device | str) -> Tensor:
    """``[count, length]`` int64 samples from random positions of the corpus."""
    starts = torch.randint(len(corpus) - length, (count,), generator=generator)
    return torch.stack([corpus[i : i + length] for i in starts.tolist()]).long().to(device)
