"""Builds the source distribution and its wheel reproducibly: the same bytes wherever and whenever they are built.

``python .ci/distribution.py dist`` writes both into ``dist``. Their timestamps are that of the last commit, or
SOURCE_DATE_EPOCH. The wheel gets the oldest platform tag that auditwheel finds its libraries compatible with; a wheel
that links to libraries other than torch, libc and libstdc++ is refused. GRADSTAT_CUDA is as in setup.py.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FROM_TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def sources() -> list[str]:
    """All files of the project, including new ones that are not committed yet."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


def source_distribution(folder: Path, epoch: int) -> Path:
    with tempfile.TemporaryDirectory() as work:
        # A copy, since setuptools writes next to the sources and packs stray files among them.
        copy = Path(work) / "gradstat"
        for name in sources():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target, follow_symlinks=False)
        run(sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "-d", work, cwd=copy, GRADSTAT_CUDA="0")
        made = next(Path(work).glob("*.tar"))
        target = folder / f"{made.name}.gz"
        with (
            tarfile.open(made) as held,
            target.open("wb") as file,
            gzip.GzipFile("", "wb", mtime=epoch, fileobj=file) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
        ):
            for member in sorted(held.getmembers(), key=lambda member: member.name):
                archive.addfile(anonymous(member, epoch), held.extractfile(member) if member.isfile() else None)
    return target


def anonymous(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """``member`` without owner, timestamp and local permissions."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = epoch
    member.mode = 0o755 if member.isdir() else 0o644
    member.pax_headers = {}
    return member


def wheel(folder: Path, source: Path, epoch: int) -> Path:
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
        times = {"SOURCE_DATE_EPOCH": str(epoch)}
        # Stripped, since nvcc puts its process id into symbol names.
        linking = {"LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -s"}
        run(*pip, "-w", work, source, cwd=folder, **times, **linking)
        made = next(Path(work).glob("*.whl"))
        if "-linux_" in made.name:
            tag = platform_tag(made)
            run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, made, cwd=folder, **times)
            made = next(Path(work).glob("*.whl"))
        return Path(shutil.move(made, folder / made.name))


def platform_tag(made: Path) -> str:
    """The oldest platform tag that satisfies what the wheel's libraries link to."""
    judged = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", made, cwd=made.parent))
    unknown = set(judged["external_libs"]) - FROM_TORCH
    if unknown:
        raise SystemExit(f"{made.name} needs libraries that nothing it depends on brings: {', '.join(sorted(unknown))}")
    return judged["sym_tag"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put them")
    folder = parser.parse_args().folder.resolve()
    os.umask(0o022)  # permissions are part of a wheel
    folder.mkdir(parents=True, exist_ok=True)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    source = source_distribution(folder, epoch)
    print(source)
    print(wheel(folder, source, epoch))


if __name__ == "__main__":
    main()
