"""What a user installs: source distribution, wheel from it, what they hold and ask for, and a first use of them."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import compatibility
import pytest
import torch
from abi3info import DATAS, FUNCTIONS
from abi3info.models import PyVersion, Symbol
from shared_library import Demands, demands_of

from gradstat import _torch_version

ROOT = Path(__file__).resolve().parent.parent
LARGEST_WHEEL = 1_000_000
"""Bytes, without CUDA kernels."""
FIRST_USE = ROOT / "tests" / "first_use.py"


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """All files of the project."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the sources")
    # Those that are new and not yet committed, too.
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def source_distribution(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # A copy, since setuptools writes beside the sources.
    copy = folder / "gradstat"
    for name in sources:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            target.write_bytes(source.read_bytes())
    run(sys.executable, "setup.py", "-q", "sdist", "-d", str(folder), cwd=copy)
    return next(folder.glob("*.tar.gz"))


def wheel_from(sdist: Path, folder: Path, **environment: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    run(*pip, "-w", str(folder), str(sdist), cwd=folder, **{"GRADSTAT_CUDA": "0", **environment})
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_from(source_distribution, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def pure_wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine without a compiler makes of the source distribution."""
    return wheel_from(source_distribution, tmp_path_factory.mktemp("pure"), PATH=str(Path(sys.executable).parent))


@pytest.fixture(scope="module")
def demands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Demands:
    with zipfile.ZipFile(wheel) as archive:
        return demands_of(Path(archive.extract("gradstat/_C.abi3.so", tmp_path_factory.mktemp("library"))))


def installed(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment in ``folder`` that holds the wheel, and sees torch and the rest of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = next((folder / "lib").glob("python3.*")) / "site-packages"
    # A path, not the environment itself: an editable gradstat in there stays out of sight.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", str(packages), str(wheel), cwd=folder)
    return python


def first_use(python: Path, *, hidden: str = "", warnings: str = "error") -> dict[str, str]:
    """Runs the program with nothing on PATH, so without a compiler, and without the module ``hidden``."""
    code = f"import runpy, sys; sys.modules[{hidden!r}] = None; runpy.run_path({str(FIRST_USE)!r}, run_name='__main__')"
    printed = run(str(python), "-W", warnings, "-c", code, cwd=python.parent, PATH="", PYTHONPATH="", CUDA_HOME="")
    found: dict[str, str] = json.loads(printed.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(python.parent.parent), "it used another gradstat than the installed one"
    return found


def test_the_source_distribution_holds_all_of_the_project(sources: list[str], source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    # The compiler of packages follows the symbolic link.
    kernels = {f"gradstat/{name}" for name in sources if name.startswith("kernels/")}
    wanted = {name for name in sources if not name.startswith(".") and name != "gradstat/kernels"} | kernels
    made = {"PKG-INFO", "setup.cfg"} | {name for name in held if name.startswith("gradstat.egg-info/")}
    assert held == wanted | made


def test_the_wheel_holds_the_package_and_nothing_else(sources: list[str], wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        information = {name for name in held if re.match(r"gradstat-[^/]*\.dist-info/", name)}
        metadata = message_from_string(archive.read(next(n for n in held if n.endswith("/METADATA"))).decode())
        tags = archive.read(next(n for n in held if n.endswith("/WHEEL"))).decode()
    package = {name for name in sources if name.startswith("gradstat/") and name != "gradstat/kernels"}
    kernels = {f"gradstat/{name}" for name in sources if name.startswith("kernels/")}
    assert held - information == package | kernels | {"gradstat/_C.abi3.so"}
    assert any(name.endswith("/licenses/LICENSE") for name in information)
    assert wheel.stat().st_size < LARGEST_WHEEL
    assert re.search(r"^Tag: cp310-abi3-linux_\w+$", tags, re.MULTILINE)
    assert "-cp310-abi3-" in wheel.name
    assert metadata["Requires-Python"] == ">=3.10"
    assert f"torch>={'.'.join(map(str, _torch_version.LEAST))}" in metadata.get_all("Requires-Dist", [])


def test_the_library_loads_with_every_python_that_the_tag_promises(demands: Demands) -> None:
    asked = {name for name in demands.symbols if name.startswith(("Py", "_Py"))}
    assert asked
    for name in asked:
        entry = FUNCTIONS.get(Symbol(name)) or DATAS.get(Symbol(name))
        assert entry is not None, f"{name} is not in Python's limited API"
        assert entry.added <= PyVersion(3, 10), f"{name} came with Python {entry.added}"
    assert demands.exported == {"PyInit__C"}


def test_the_library_takes_from_torch_only_its_stable_interface(demands: Demands) -> None:
    include = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    headers = [include / "stable" / "c" / "shim.h", *(include / "inductor" / "aoti_torch" / "c").glob("*.h")]
    declared = "\n".join(path.read_text() for path in headers)
    taken = {name for name in demands.symbols if re.match(r"(aoti_)?torch_", name)}
    assert taken
    assert {name for name in taken if not re.search(rf"\b{name}\(", declared)} == set()
    # Everything else is the system's and says in which version: nothing may be bound to what torch leaks.
    others = {name: version for name, version in demands.symbols.items() if name not in taken}
    unversioned = {name for name, version in others.items() if not version and not name.startswith(("Py", "_Py"))}
    assert unversioned == set()
    assert {version.split("_")[0] for version in others.values() if version} <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
    # By libtorch a CUDA build of torch brings libtorch_cuda.
    assert {"libtorch.so", "libtorch_cpu.so", "libc10.so"} <= demands.libraries
    assert demands.libraries <= system | {"libtorch.so", "libtorch_cpu.so", "libc10.so"}


def test_first_use_of_the_wheel_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    assert first_use(installed(wheel, tmp_path))["cpu"] == "native"


def test_first_use_without_triton(wheel: Path, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path)
    assert first_use(python, hidden="triton")["cpu"] == "native"
    assert "cpu     native     chosen" in run(str(python), "-m", "gradstat", "info", cwd=tmp_path, PYTHONPATH="")


def test_without_a_compiler_the_wheel_is_pure_python_and_says_so(pure_wheel: Path, tmp_path: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    python = installed(pure_wheel, tmp_path)
    assert first_use(python, warnings="ignore:gradstat runs its slow reference")["cpu"] == "reference"
    assert "no C++ compiler was found at installation" in run(
        str(python), "-m", "gradstat", "info", cwd=tmp_path, PYTHONPATH=""
    )


def test_the_table_of_versions_is_what_was_found() -> None:
    document = compatibility.DOCUMENT.read_text()
    assert compatibility.MARKED.search(document), "the page has lost its markers"
    assert compatibility.rendered(document) == document, "run `python tests/compatibility.py --write`"


@pytest.mark.parametrize("found", ["2.9.1", "2.9.1+cu128", "1.13.0"])
def test_a_torch_that_is_too_old_is_named_with_the_remedy(found: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"needs torch >= 2.10, found torch {found}. Upgrade it: pip in")):
        _torch_version.require(found)


@pytest.mark.parametrize("found", ["2.10.0", "2.10.0a0+git1234", "2.11.0.dev20260101", "3.0.0"])
def test_a_torch_that_is_new_enough_is_taken(found: str) -> None:
    _torch_version.require(found)
