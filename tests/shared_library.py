"""What a compiled library asks of the system that loads it: libraries, and symbols with the version they must have."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Demands:
    """What has to be there when a library is loaded, and what it gives in return.

    Attributes:
        libraries: Names of the libraries that are loaded with it.
        symbols: What it takes from others; the value is the symbol's version, such as GLIBC_2.14, "" if it has none.
        exported: What others can take from it, less what every C++ library has of templates and inline functions.
        paths: All strings in the file that look like a path.
    """

    libraries: frozenset[str]
    symbols: dict[str, str]
    exported: frozenset[str]
    paths: frozenset[str]


def demands_of(path: Path) -> Demands:
    dynamic = _printed("readelf", "--dynamic", "--wide", path)
    libraries = frozenset(line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line)
    symbols, exported = {}, set()
    for line in _printed("nm", "--dynamic", path).splitlines():
        kind, name = line.split()[-2:]
        if kind == "U":
            name, _, version = name.partition("@")
            symbols[name] = version.lstrip("@")
        elif kind in "TDBR" and name not in ("__bss_start", "_edata", "_end"):
            exported.add(name)
    strings = _printed("strings", "--all", path).splitlines()
    return Demands(libraries, symbols, frozenset(exported), frozenset(s for s in strings if s.startswith("/")))


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
