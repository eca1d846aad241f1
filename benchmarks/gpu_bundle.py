"""``make gpu-bundle``: compiles libraries on a machine without a GPU, for one with a GPU that need not compile then.

``python benchmarks/gpu_bundle.py`` compiles into ``gpu-bundle/``, for every architecture or those named in
GRADSTAT_CUDA_ARCHITECTURES, and records a hash of the sources; `install` refuses the libraries if sources changed.
For named architectures it also compiles the variants that `gpu_variants` times. The libraries use the stable ABIs of
Python and torch, so the versions there may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernel_variants import compile_all

ROOT = Path(__file__).resolve().parent.parent
_REMEDY = "Rebuild it (`make gpu-bundle`), or delete gpu-bundle/ to compile here."


def install(root: Path = ROOT) -> bool:
    """Copies the bundle's libraries into the package; returns whether there is a bundle.

    Raises:
        RuntimeError: The libraries were compiled from other sources, are damaged, or have no code for this GPU.
    """
    made = _made(root)
    if made is None:
        return False
    _refuse_for_another_gpu(made)
    for name in made["libraries"]:
        if "/" in name:  # a variant
            continue
        # Replaced by a rename, since a running program may have the old file mapped.
        shutil.copyfile(root / "gpu-bundle" / name, root / "gradstat" / f"{name}.new")
        os.replace(root / "gradstat" / f"{name}.new", root / "gradstat" / name)
    print(f"gpu-bundle: {made['architectures']}, compiled with torch {made['torch']} and Python {made['python']}")
    return True


def variants(capability: tuple[int, int], root: Path = ROOT) -> Path | None:
    """The folder of the bundle's variants for a GPU of that compute capability, if there are any.

    Raises:
        RuntimeError: As for `install`.
    """
    made = _made(root)
    if made is None:
        return None
    kept = {name.split("/")[1] for name in made["libraries"] if "/" in name}
    best = _best_for(capability, kept)
    return root / "gpu-bundle" / "variants" / best if best else None


def _made(root: Path) -> dict[str, Any] | None:
    """The bundle's manifest, if there is a bundle; raises RuntimeError if that is stale or damaged."""
    bundle, manifest = root / "gpu-bundle", root / "gpu-bundle" / "manifest.json"
    if not manifest.exists():
        return None
    made: dict[str, Any] = json.loads(manifest.read_text())
    if made["sources"] != hash_of_sources(root):
        raise RuntimeError(
            "gpu-bundle/ is stale: it was compiled from other versions of csrc/, setup.py, gradstat/_fields.py or "
            f"benchmarks/kernel_variant*. {_REMEDY}"
        )
    for name, expected in made["libraries"].items():
        if not (bundle / name).exists() or _hash(bundle / name) != expected:
            raise RuntimeError(f"gpu-bundle/{name} is missing or damaged. {_REMEDY}")
    return made


def _refuse_for_another_gpu(made: dict[str, Any]) -> None:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    if _best_for((major, minor), made["architectures"].replace("sm_", "").split()) is None:
        raise RuntimeError(
            f"gpu-bundle/ is for other GPUs: expected code for sm_{major}{minor}, which this GPU runs, "
            f"got {made['architectures']}. Rebuild it (`make gpu-bundle ARCHITECTURES={major}{minor}`), or "
            "delete gpu-bundle/ to compile here."
        )


def _best_for(capability: tuple[int, int], architectures: Iterable[str]) -> str | None:
    """The newest of architectures such as ``"90"``, ``"90a"`` and ``"100f"`` whose machine code a GPU runs, if any."""
    found = []
    for architecture in architectures:
        number, suffix = re.fullmatch(r"(\d+)([af]?)", architecture).groups()  # type: ignore[union-attr]
        major, minor = divmod(int(number), 10)
        if capability == (major, minor) or (suffix != "a" and capability[0] == major and capability[1] > minor):
            found.append(((major, minor), architecture))
    return max(found)[1] if found else None


def make(root: Path = ROOT) -> None:
    """Compiles the libraries into the bundle."""
    bundle, sources = root / "gpu-bundle", hash_of_sources(root)
    shutil.rmtree(bundle, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", folder, "--build-temp", folder]
        subprocess.run(command, cwd=root, env={**os.environ, "GRADSTAT_CUDA": "1"}, check=True)
        shutil.copytree(Path(folder) / "gradstat", bundle)
    for architecture in os.environ.get("GRADSTAT_CUDA_ARCHITECTURES", "").split():
        compile_all(architecture, bundle / "variants" / architecture)
    describe(bundle, sources)


def describe(bundle: Path, sources: str) -> None:
    """Writes the manifest of ``bundle``: hash of the sources, libraries, architectures, and versions compiled with."""
    import torch

    libraries = sorted(bundle.rglob("*.so"))
    # Read from the file, since this torch may be unable to load the library.
    (architectures,) = re.findall(rb"\0(sm_\d+\w?(?: sm_\d+\w?)*)\0", (bundle / "_C_cuda.abi3.so").read_bytes())
    made = {
        "sources": sources,
        "libraries": {path.relative_to(bundle).as_posix(): _hash(path) for path in libraries},
        "architectures": architectures.decode(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (bundle / "manifest.json").write_text(json.dumps(made, indent=2) + "\n")
    for folder in dict.fromkeys(path.parent for path in libraries):
        sizes = [path.stat().st_size for path in libraries if path.parent == folder]
        print(f"{folder.relative_to(bundle.parent)}: {len(sizes)} libraries, {sum(sizes) / 1e6:.1f} MB")


def hash_of_sources(root: Path) -> str:
    files = [*sorted((root / "csrc").glob("*.*")), root / "setup.py", root / "gradstat" / "_fields.py"]
    files += sorted((root / "benchmarks").glob("kernel_variant*.*"))
    return hashlib.sha256("".join(f"{path.name} {_hash(path)}\n" for path in files).encode()).hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    make()
