"""``make gpu-bundle``: compiles libraries on a machine without a GPU, for one with a GPU that need not compile then.

``python benchmarks/gpu_bundle.py`` compiles into ``gpu-bundle/``, for every architecture or those named in
GRADSTAT_CUDA_ARCHITECTURES, and records a hash of the sources; `install` refuses the libraries if sources changed.
The libraries use the stable ABIs of Python and torch, so the versions there may differ.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_REMEDY = "Rebuild it (`make gpu-bundle`), or delete gpu-bundle/ to compile here."


def install(root: Path = ROOT) -> bool:
    """Copies the bundle's libraries into the package; returns whether there is a bundle.

    Raises:
        RuntimeError: The libraries were compiled from other sources, are damaged, or have no code for this GPU.
    """
    bundle, manifest = root / "gpu-bundle", root / "gpu-bundle" / "manifest.json"
    if not manifest.exists():
        return False
    made = json.loads(manifest.read_text())
    if made["sources"] != hash_of_sources(root):
        raise RuntimeError(
            "gpu-bundle/ is stale: it was compiled from other versions of csrc/, setup.py or gradstat/_fields.py. "
            f"{_REMEDY}"
        )
    for name, expected in made["libraries"].items():
        if not (bundle / name).exists() or _hash(bundle / name) != expected:
            raise RuntimeError(f"gpu-bundle/{name} is missing or damaged. {_REMEDY}")
    _refuse_for_another_gpu(made["architectures"])
    for name in made["libraries"]:
        # Replaced by a rename, since a running program may have the old file mapped.
        shutil.copyfile(bundle / name, root / "gradstat" / f"{name}.new")
        os.replace(root / "gradstat" / f"{name}.new", root / "gradstat" / name)
    print(f"gpu-bundle: {made['architectures']}, compiled with torch {made['torch']} and Python {made['python']}")
    return True


def _refuse_for_another_gpu(architectures: str) -> None:
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    if not any(_runs_on((major, minor), architecture) for architecture in architectures.split()):
        raise RuntimeError(
            f"gpu-bundle/ is for other GPUs: expected code for sm_{major}{minor}, which this GPU runs, "
            f"got {architectures}. Rebuild it (`make gpu-bundle ARCHITECTURES={major}{minor}`), or "
            "delete gpu-bundle/ to compile here."
        )


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Whether a GPU runs machine code for an architecture such as ``"sm_90"``, ``"sm_90a"`` or ``"sm_100f"``."""
    number, suffix = re.fullmatch(r"sm_(\d+)([af]?)", architecture).groups()  # type: ignore[union-attr]
    major, minor = divmod(int(number), 10)
    return capability == (major, minor) or (suffix != "a" and capability[0] == major and capability[1] > minor)


def make(root: Path = ROOT) -> None:
    """Compiles the libraries into the bundle."""
    bundle, sources = root / "gpu-bundle", hash_of_sources(root)
    shutil.rmtree(bundle, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", folder, "--build-temp", folder]
        subprocess.run(command, cwd=root, env={**os.environ, "GRADSTAT_CUDA": "1"}, check=True)
        shutil.copytree(Path(folder) / "gradstat", bundle)
    describe(bundle, sources)


def describe(bundle: Path, sources: str) -> None:
    """Writes the manifest of ``bundle``: hash of the sources, libraries, architectures, and versions compiled with."""
    import torch

    libraries = sorted(bundle.glob("*.so"))
    # Read from the file, since this torch may be unable to load the library.
    (architectures,) = re.findall(rb"\0(sm_\d+\w?(?: sm_\d+\w?)*)\0", (bundle / "_C_cuda.abi3.so").read_bytes())
    made = {
        "sources": sources,
        "libraries": {path.name: _hash(path) for path in libraries},
        "architectures": architectures.decode(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (bundle / "manifest.json").write_text(json.dumps(made, indent=2) + "\n")
    sizes = [path.stat().st_size for path in libraries]
    print(f"{bundle.name}: {len(sizes)} libraries, {sum(sizes) / 1e6:.1f} MB")


def hash_of_sources(root: Path) -> str:
    files = [*sorted((root / "csrc").glob("*.*")), root / "setup.py", root / "gradstat" / "_fields.py"]
    return hashlib.sha256("".join(f"{path.name} {_hash(path)}\n" for path in files).encode()).hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    make()
