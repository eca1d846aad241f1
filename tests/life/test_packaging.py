"""What a user installs: source distribution and wheel, their contents and dependencies, and a first use."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest
import torch
from abi3info import DATAS, FUNCTIONS
from abi3info.models import PyVersion, Symbol
from helpers.processes import ROOT, python

import gradstat
from gradstat import _torch_version

FIRST_USE = ROOT / "tools" / "first_use.py"


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@dataclass(frozen=True)
class Demands:
    """The dynamic dependencies and exports of a compiled library."""

    libraries: frozenset[str]  # needed libraries
    symbols: dict[str, str]  # undefined symbols, each with its version, such as GLIBC_2.14, or "" if it has none
    exported: frozenset[str]  # exported symbols, except those of templates and inline functions
    paths: frozenset[str]  # all strings in the file that look like paths


def demands_of(path: Path) -> Demands:
    dynamic = run("readelf", "--dynamic", "--wide", str(path))
    libraries = frozenset(line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line)
    symbols, exported = {}, set()
    for line in run("nm", "--dynamic", str(path)).splitlines():
        kind, name = line.split()[-2:]
        if kind == "U":
            name, _, version = name.partition("@")
            symbols[name] = version.lstrip("@")
        elif kind in "TDBR" and name not in ("__bss_start", "_edata", "_end"):
            exported.add(name)
    strings = run("strings", "--all", str(path)).splitlines()
    return Demands(libraries, symbols, frozenset(exported), frozenset(s for s in strings if s.startswith("/")))


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """All files of the project."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the sources")
    # Including new ones that are not committed yet.
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


def built(folder: Path, **environment: str) -> dict[str, Path]:
    """Source distribution and wheel, by suffix, as `make wheel` makes them."""
    script = str(ROOT / ".ci" / "distribution.py")
    printed = run(sys.executable, script, str(folder), cwd=folder, **{"GRADSTAT_CUDA": "0", **environment})
    return {Path(line).suffix: Path(line) for line in printed.splitlines()}


@pytest.fixture(scope="module")
def distribution(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    # Not optimized, as that takes most of the time; makes the library larger.
    return built(tmp_path_factory.mktemp("distribution"), GRADSTAT_INSTRUMENTATION="-O0")


@pytest.fixture(scope="module")
def pure(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A build without a compiler, with another folder for temporary files, in another time zone."""
    folder = tmp_path_factory.mktemp("another folder")
    (folder / "git").symlink_to(shutil.which("git"))
    return built(folder, PATH=str(folder), CXX="", TMPDIR=str(folder), TZ="Asia/Tokyo", LC_ALL="C")


@pytest.fixture(scope="module", params=["_C", "_C_cuda"])
def library(request: pytest.FixtureRequest) -> tuple[str, Demands]:
    """Each of the two libraries, with its name, as compiled in place: optimized."""
    name = request.param
    path = ROOT / "gradstat" / f"{name}.abi3.so"
    if name == "_C_cuda" and not path.exists() and (not shutil.which("nvcc") or os.environ.get("GRADSTAT_CUDA") == "0"):
        pytest.skip("there is no nvcc on PATH to compile CUDA code with, or GRADSTAT_CUDA=0")
    return name, demands_of(path)


def first_use(wheel: Path, folder: Path, *, hidden: str = "", warnings: str = "error") -> tuple[dict[str, str], str]:
    """Installs the wheel, and runs the program without a compiler and the module ``hidden``; then `info`.

    In front of this environment's packages, with an empty PATH.
    """
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", str(folder), str(wheel), cwd=folder)
    code = (
        f"import runpy, sys; sys.modules[{hidden!r}] = None; runpy.run_path({str(FIRST_USE)!r})['main']()\n"
        f"del sys.modules[{hidden!r}]; from gradstat.__main__ import main; main(['info'])"
    )
    command = [sys.executable, "-W", warnings, "-c", code]
    printed = run(*command, cwd=folder, PATH="", PYTHONPATH=str(folder), CUDA_HOME="")
    found, _, info = printed.partition("\n")
    used: dict[str, str] = json.loads(found)
    assert Path(used["file"]).is_relative_to(folder), "it used another gradstat than the installed one"
    return used, info


def test_the_source_distribution_holds_all_of_the_project(sources: list[str], distribution: dict[str, Path]) -> None:
    with tarfile.open(distribution[".gz"]) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    # setuptools follows the symbolic link.
    kernels = {f"gradstat/{name}" for name in sources if name.startswith("kernels/")}
    wanted = {name for name in sources if not name.startswith(".") and name != "gradstat/kernels"} | kernels
    made = {"PKG-INFO", "setup.cfg"} | {name for name in held if name.startswith("gradstat.egg-info/")}
    assert held == wanted | made


def test_the_wheel_holds_the_package_and_nothing_else(sources: list[str], distribution: dict[str, Path]) -> None:
    wheel = distribution[".whl"]
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        information = {name for name in held if re.match(r"gradstat-[^/]*\.dist-info/", name)}
        metadata = message_from_string(archive.read(next(n for n in held if n.endswith("/METADATA"))).decode())
        tags = archive.read(next(n for n in held if n.endswith("/WHEEL"))).decode()
    package = {name for name in sources if name.startswith("gradstat/") and name != "gradstat/kernels"}
    kernels = {f"gradstat/{name}" for name in sources if name.startswith("kernels/")}
    assert held - information == package | kernels | {"gradstat/_C.abi3.so"}
    assert any(name.endswith("/licenses/LICENSE") for name in information)
    assert wheel.stat().st_size < 1_000_000  # without CUDA kernels
    (tag,) = re.findall(r"^Tag: (.*)$", tags, re.MULTILINE)
    assert wheel.stem.endswith(f"-{tag}")
    assert tag.startswith("cp310-abi3-manylinux_2_")
    assert metadata["Requires-Python"] == ">=3.10"
    assert f"torch>={'.'.join(map(str, _torch_version.LEAST))}" in metadata.get_all("Requires-Dist", [])


def test_links_lead_to_the_repository_and_the_citation_names_this_version() -> None:
    code = (
        "from setuptools import Distribution; import distutils.core; "
        "made = distutils.core.run_setup('setup.py', stop_after='config').metadata; "
        "print(made.project_urls); print(made.long_description)"
    )
    run_setup = [sys.executable, "-W", "ignore", "-c", code]
    elsewhere = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "owner/name", "GRADSTAT_COMPILE": "0"}
    urls, _, text = run(*run_setup, **elsewhere).partition("\n")
    assert "'Repository': 'https://host/owner/name'" in urls
    assert re.findall(r"!\[[^]]*\]\((.*?)\)", text)[0] == "https://host/owner/name/raw/main/docs/view.png"
    links = re.findall(r"\]\((.*?)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    urls, _, text = run(*run_setup, **{**elsewhere, "GITHUB_REPOSITORY": ""}).partition("\n")
    assert urls == "{}"
    assert text.strip() == (ROOT / "README.md").read_text().strip()
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [gradstat.__version__]


def test_a_second_build_elsewhere_is_the_same_to_the_byte(distribution: dict[str, Path], pure: dict[str, Path]) -> None:
    """Except for the compiled library, which the second lacks; another test checks the paths in it."""
    assert pure[".gz"].name == distribution[".gz"].name
    same = pure[".gz"].read_bytes() == distribution[".gz"].read_bytes()
    assert same, "the sdist depends on where or when it is built, or a source was changed meanwhile"
    listed = []
    for made in (distribution, pure):
        with zipfile.ZipFile(made[".whl"]) as archive:
            differing = ("gradstat/_C.abi3.so", "/RECORD", "/WHEEL")
            members = [member for member in archive.infolist() if not member.filename.endswith(differing)]
            listed.append([(m.filename, m.date_time, m.external_attr, m.CRC) for m in members])
    assert listed[0] == listed[1]
    code = "".join(path.read_text() for path in (ROOT / "csrc").iterdir())
    assert not re.search("__(DATE|TIME|TIMESTAMP)__", code)


def test_the_library_names_nothing_of_its_builder_and_needs_no_newer_system_than_its_tag(
    distribution: dict[str, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(distribution[".whl"]) as archive:
        demands = demands_of(Path(archive.extract("gradstat/_C.abi3.so", tmp_path)))
    homes = (str(ROOT), sys.prefix, str(Path(torch.__file__).parent), tempfile.gettempdir())
    assert [path for path in demands.paths if path.startswith(homes)] == []
    promised = re.findall(r"manylinux_(\d+)_(\d+)_", distribution[".whl"].name)
    needed = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version) for version in set(demands.symbols.values())]
    assert max((int(m[1]), int(m[2])) for m in needed if m) <= tuple(map(int, promised[0]))


def test_the_library_loads_with_every_python_that_the_tag_promises(library: tuple[str, Demands]) -> None:
    name, demands = library
    asked = {name for name in demands.symbols if name.startswith(("Py", "_Py"))}
    assert asked
    for symbol in asked:
        entry = FUNCTIONS.get(Symbol(symbol)) or DATAS.get(Symbol(symbol))
        assert entry is not None, f"{symbol} is not in Python's limited API"
        assert entry.added <= PyVersion(3, 10), f"{symbol} came with Python {entry.added}"
    assert demands.exported == {f"PyInit_{name}"}


def test_the_library_takes_from_torch_only_its_stable_interface(library: tuple[str, Demands]) -> None:
    demands = library[1]
    include = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    headers = [include / "stable" / "c" / "shim.h", *(include / "inductor" / "aoti_torch" / "c").glob("*.h")]
    declared = "\n".join(path.read_text() for path in headers)
    taken = {name for name in demands.symbols if re.match(r"(aoti_)?torch_", name)}
    assert taken
    assert {name for name in taken if not re.search(rf"\b{name}\(", declared)} == set()
    # All other symbols are the system's and versioned: nothing may bind to symbols that torch leaks.
    others = {name: version for name, version in demands.symbols.items() if name not in taken}
    unversioned = {name for name, version in others.items() if not version and not name.startswith(("Py", "_Py"))}
    assert unversioned == set()
    assert {version.split("_")[0] for version in others.values() if version} <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
    system.add("ld-linux-x86-64.so.2")  # of CUDA's runtime, which is linked in
    # With a CUDA build of torch, libtorch loads libtorch_cuda.
    assert {"libtorch.so", "libtorch_cpu.so", "libc10.so"} <= demands.libraries
    assert demands.libraries <= system | {"libtorch.so", "libtorch_cpu.so", "libc10.so"}


def test_first_use_needs_neither_compiler_nor_triton(distribution: dict[str, Path], tmp_path: Path) -> None:
    found, info = first_use(distribution[".whl"], tmp_path, hidden="triton")
    assert found["cpu"] == "native"
    assert "cpu     native     chosen" in info


def test_without_a_compiler_the_wheel_is_pure_python_and_says_so(pure: dict[str, Path], tmp_path: Path) -> None:
    assert pure[".whl"].name.endswith("-py3-none-any.whl")
    found, info = first_use(pure[".whl"], tmp_path, warnings="ignore:gradstat uses its slow reference")
    assert found["cpu"] == "reference"
    why = "no C++ compiler was found at installation, no Python headers, or GRADSTAT_COMPILE=0 was set"
    assert why in " ".join(info.split())


def test_a_torch_that_is_too_old_is_named_with_the_remedy() -> None:
    for found in ("2.10.0", "2.10.0a0+git1234", "2.11.0.dev20260101", "3.0.0"):
        _torch_version.require(found)
    for found in ("2.9.1", "2.9.1+cu128", "1.13.0"):
        with pytest.raises(ImportError, match=re.escape(f"needs torch >= 2.10, found torch {found}. Upgrade it: pip")):
            _torch_version.require(found)


def test_a_python_without_torch_is_told_what_to_install() -> None:
    result = python("-S", "-c", "import gradstat", cwd=ROOT, PYTHONPATH="")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(
        "gradstat needs PyTorch, which this Python does not have: pip install torch"
    )


def test_a_setuptools_that_is_too_old_is_named_with_the_remedy() -> None:
    """Its own message is about the license in pyproject.toml."""
    code = "import runpy, setuptools; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')"
    result = python("-c", code, cwd=ROOT)
    least = re.findall(r'"setuptools>=(\d+)"', (ROOT / "pyproject.toml").read_text())[0]
    told = f"gradstat needs setuptools >= {least} to be built, found 65.5.0. "
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(told)
    assert f'pip install -U "setuptools>={least}"' in result.stderr
