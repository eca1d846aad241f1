"""What a user installs: source distribution, wheel from it, and the wheel of a machine without a compiler."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # A copy, since setuptools writes beside the sources.
    copy = folder / "gradstat"
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0") if (ROOT / ".git").exists() else None
    if files is None:
        pytest.skip("not a git checkout: there is no list of the sources")
    for name in filter(None, files):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.exists():
            target.write_bytes(source.read_bytes())
    run(sys.executable, "setup.py", "-q", "sdist", "-d", str(folder), cwd=copy)
    return next(folder.glob("*.tar.gz"))


def wheel_from(sdist: Path, folder: Path, **environment: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    run(*pip, "-w", str(folder), str(sdist), cwd=folder, GRADSTAT_CUDA="0", **environment)
    return next(folder.glob("*.whl"))


def test_the_source_distribution_is_complete(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "csrc/stats_cuda.cuh", "csrc/stat_fields.def"}
    needed |= {"kernels/stats.py", "gradstat/kernels/stats.py", "tests/conftest.py", "tests/cuda_on_host/kernels.cpp"}
    assert needed <= held


def test_the_wheel_works_and_serves_every_python(source_distribution: Path, tmp_path: Path) -> None:
    wheel = wheel_from(source_distribution, tmp_path)
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = set(archive.namelist())
    assert {
        "gradstat/_C.abi3.so",
        "gradstat/kernels/stats.py",
        "gradstat/py.typed",
        "gradstat/monitor/page/page.html",
    } <= names
    assert not any(name.startswith(("kernels/", "tests/", "benchmarks/")) for name in names)
    code = (
        "import gradstat, gradstat.kernels, torch; print(gradstat.__file__)\n"
        "print(gradstat.check_tensors([torch.ones(4)], backend='native').total_norm)"
    )
    printed = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed")).splitlines()
    assert printed[0].startswith(str(tmp_path))
    assert printed[1] == "2.0"


def test_without_a_compiler_the_wheel_is_pure_python(source_distribution: Path, tmp_path: Path) -> None:
    wheel = wheel_from(source_distribution, tmp_path, PATH=str(Path(sys.executable).parent), CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
