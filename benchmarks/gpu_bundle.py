"""`make gpu-bundle`: libraries for a machine with a GPU, compiled where there is none, so that it need not compile.

``python benchmarks/gpu_bundle.py`` compiles into ``gpu-bundle/``, for every architecture or those named in
GRADSTAT_CUDA_ARCHITECTURES, and writes down what from; `install` takes them from there, unless the sources changed.
Python and torch may be others than those they were compiled with, for their interfaces are the stable ones.
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


def install(root: Path = ROOT) -> bool:
    """Copies the libraries of the bundle, if there is one, into the package; whether there is.

    Raises:
        RuntimeError: They were compiled from other sources than those here, or are not what was compiled.
    """
    bundle, manifest = root / "gpu-bundle", root / "gpu-bundle" / "manifest.json"
    if not manifest.exists():
        return False
    made = json.loads(manifest.read_text())
    remedy = "Make it again (`make gpu-bundle`), or delete gpu-bundle/ to compile here."
    if made["sources"] != hash_of_sources(root):
        raise RuntimeError(
            "gpu-bundle/ is stale: expected libraries compiled from csrc/, setup.py and gradstat/_fields.py as they "
            f"are here, got some compiled from others. {remedy}"
        )
    for name, expected in made["libraries"].items():
        if not (bundle / name).exists() or _hash(bundle / name) != expected:
            raise RuntimeError(f"gpu-bundle/{name} is missing or damaged: it is not what was compiled. {remedy}")
    for name in made["libraries"]:
        # Renamed into its place, as a program may be running with the one that is there.
        shutil.copyfile(bundle / name, root / "gradstat" / f"{name}.new")
        os.replace(root / "gradstat" / f"{name}.new", root / "gradstat" / name)
    print(f"gpu-bundle: {made['architectures']}, compiled with torch {made['torch']} and Python {made['python']}")
    return True


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
    """Writes down what the libraries in ``bundle`` were compiled from, for what, and with what."""
    import torch

    libraries = sorted(bundle.glob("*.so"))
    # As the library would say, if this torch could load it.
    (architectures,) = re.findall(rb"\0(sm_\d+\w?(?: sm_\d+\w?)*)\0", (bundle / "_C_cuda.abi3.so").read_bytes())
    made = {
        "sources": sources,
        "libraries": {path.name: _hash(path) for path in libraries},
        "architectures": architectures.decode(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (bundle / "manifest.json").write_text(json.dumps(made, indent=2) + "\n")
    for path in libraries:
        print(f"{path.relative_to(bundle.parent)}: {path.stat().st_size / 1e6:.1f} MB")


def hash_of_sources(root: Path) -> str:
    files = [*sorted((root / "csrc").glob("*.*")), root / "setup.py", root / "gradstat" / "_fields.py"]
    return hashlib.sha256("".join(f"{path.name} {_hash(path)}\n" for path in files).encode()).hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    make()
