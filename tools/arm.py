"""`make arm`: cross-compiles the CPU library for 64-bit Arm and tests it under an emulator. Nothing is timed.

Compiles with Debian's cross compiler, checks that the hot loops use 128-bit vectors and no scalars, and runs the tests
of the kernels under QEMU, with Python and torch for Arm, which it downloads into build/arm.

    apt-get install g++-aarch64-linux-gnu qemu-user debootstrap
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import instrumented

ROOT = instrumented.ROOT
BUILD = ROOT / "build" / "arm"
SYSTEM, PACKAGES = BUILD / "system", BUILD / "packages"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# The newest torch whose Arm wheel does not need CUDA libraries.
TORCH = "2.10.0"
REQUIRED = (
    "attrs filelock fsspec hypothesis iniconfig jinja2 markupsafe mpmath networkx numpy packaging pluggy pygments"
)
REQUIRED += " pytest sortedcontainers sympy typing_extensions"
TESTS = ("conformance", "multiply")
# float32, float64 and float16, each real and complex, and bfloat16.
HOT_LOOPS = 7
# fcmp is allowed: a comparison with zero tests whether a multiplier is used.
SCALAR = re.compile(r"\t(f(?!cmp)\w+|dup|ins|umov)\s+[sdhwx]\d+,")


def main() -> int:
    if missing := [tool for tool in (COMPILER, EMULATOR, "debootstrap") if shutil.which(tool) is None]:
        sys.exit(f"{', '.join(missing)}: not found; apt-get install g++-aarch64-linux-gnu qemu-user debootstrap")
    BUILD.mkdir(parents=True, exist_ok=True)
    make_system()
    include = PACKAGES / "torch" / "include"
    flags = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030a0000", "-DUSE_CUDA"]
    flags += [f"-I{ROOT / 'csrc'}", f"-isystem{include}", f"-isystem{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    check_loops(flags)
    package = BUILD / "package" / "gradstat"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "gradstat", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    sources = [str(ROOT / "csrc" / name) for name in ("ops.cpp", "stats_cpu.cpp")]
    libraries = f"-L{PACKAGES / 'torch' / 'lib'} -lstdc++ -ltorch -ltorch_cpu -lc10 -Wl,--allow-shlib-undefined".split()
    target = ["-shared", "-o", str(package / "_C.abi3.so"), f"-I{sysconfig.get_path('include')}"]
    subprocess.run([COMPILER, *flags, *target, *sources, *libraries], check=True)
    path = os.pathsep.join(map(str, (PACKAGES, package.parent, ROOT / "tests")))
    emulated = [EMULATOR, "-L", str(SYSTEM), str(SYSTEM / "usr" / "bin" / "python3.11")]
    tests = [*emulated, *instrumented.tests(TESTS, *instrumented.COMPILED)[1:]]
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return 0 if instrumented.step("tests of kernels on Arm, emulated", tests, package.parent, variables) else 1


def make_system() -> None:
    """Unpacks Python, torch and the packages that the tests need, unless that was done before."""
    done = BUILD / f"torch-{TORCH}"
    if done.exists():
        return
    print("downloading a system of Debian's for Arm, and torch", flush=True)
    shutil.rmtree(SYSTEM, ignore_errors=True)
    packages = "--include=python3.11,libstdc++6,libgomp1"
    kind = ["--foreign", "--arch=arm64", "--variant=minbase", packages]
    subprocess.run(["debootstrap", *kind, "bookworm", str(SYSTEM)], check=True, stdout=subprocess.DEVNULL)
    for archive in (SYSTEM / "var" / "cache" / "apt" / "archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(SYSTEM)], check=True)
    platforms = [f"--platform=manylinux{version}_aarch64" for version in ("2014", "_2_27", "_2_28")]
    wheels = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--target", str(PACKAGES), *platforms]
    install = [sys.executable, "-m", "pip", "install", "--quiet", *wheels, f"torch=={TORCH}", *REQUIRED.split()]
    subprocess.run(install, check=True)
    done.touch()


def check_loops(flags: list[str]) -> None:
    """Checks that the loops that prefetch, which are those over all values, use vectors only."""
    assembly = BUILD / "stats_cpu.s"
    source = str(ROOT / "csrc" / "stats_cpu.cpp")
    subprocess.run([COMPILER, *flags, "-S", "-o", str(assembly), source], check=True)
    lines = assembly.read_text().splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\d+:", line)}
    spans = []
    for end, line in enumerate(lines):
        jump = re.match(r"\t(?:b\.?\w*|cbn?z\s+\w+,|tbn?z\s+\w+, #?\d+,)\s+(\.L\d+)$", line)
        start = labels.get(jump[1], end) if jump else end
        is_innermost = start < end and not any(start <= first and last <= end for first, last in spans)
        if is_innermost and any("\tprfm\t" in of_loop for of_loop in lines[start:end]):
            spans.append((start, end))
    loops = [lines[start : end + 1] for start, end in spans]
    scalar = [line.strip() for loop in loops for line in loop if SCALAR.match(line)]
    vectors = [sum(bool(re.search(r"\bv\d+\.(4s|2d|8h|16b)", line)) for line in loop) for loop in loops]
    print(
        f"{len(loops)} hot loops of {', '.join(str(len(loop)) for loop in loops)} instructions, of 128 bits: {vectors}"
    )
    if len(loops) != HOT_LOOPS or scalar or not all(vectors):
        sys.exit(f"expected {HOT_LOOPS} loops of vectors of 128 bits, without scalars; found {scalar}")


if __name__ == "__main__":
    sys.exit(main())
