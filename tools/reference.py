"""Writes the text about functions and classes in docs/api/*.md, from their signatures and docstrings.

``python tools/reference.py --write``; a test checks that nothing is left to write. A page marks the place of a thing by
``<!-- gradstat.Report() members: all -->``: brackets for a class that only gradstat makes, ``members`` for which of its
members to describe, and everything up to ``<!-- end -->`` is written. A name of gradstat in single backticks in a
docstring becomes a link; one that leads nowhere, or to several places, is an error.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs" / "api").glob("*.md"))
MARKED = re.compile(r"(<!-- (gradstat[\w.]*)(\(\))?(?: members: ([\w, ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
HEADING = re.compile(r"^##+ `?(gradstat[\w.]*)`?$", re.MULTILINE)
SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
Link = Callable[[str], str]
WIDTH = 100


def thing(name: str) -> Any:
    """The public thing of that full name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def anchor(heading: str) -> str:
    """The end of a link to a heading, on code hosts and on the site."""
    return re.sub(r"[^\w-]", "", heading.lower())


def signature(name: str, function: Any, is_method: bool) -> str:
    """``name(arguments) -> type`` as it is written in the source; an argument a line if it is long."""
    found = inspect.signature(function)
    words = [_argument(parameter) for parameter in list(found.parameters.values())[is_method:]]
    kinds = [parameter.kind for parameter in list(found.parameters.values())[is_method:]]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = _type(found.return_annotation)
    result = f" -> {result}" if result not in ("", "None") else ""
    line = f"{name}({', '.join(words)}){result}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _argument(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind, default = _type(parameter.annotation), parameter.default
    word = f"{stars}{parameter.name}" + f": {kind}" * bool(kind)
    if default is parameter.empty:
        return word
    shown = repr(default)
    return f"{word}{' = ' if kind else '='}{'...' if shown.startswith('<') else shown}"


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def markdown(docstring: str, link: Link) -> str:
    """A docstring as Markdown: code in fences and backticks, names as links, sections as lists."""
    out: list[str] = []
    lines = inspect.cleandoc(docstring).splitlines()
    while lines:
        line = lines.pop(0)
        section = SECTION.match(line)
        if section:
            block = _indented(lines)
            out += [f"**{section[1]}**", ""]
            out += [_inline("\n".join(block), link), ""] if section[1] == "Returns" else _items(block, link)
        elif line.endswith("::"):
            before = _inline(line[:-2].rstrip() + ("" if line.endswith(" ::") else ":"), link).strip()
            block = _indented(lines)
            out += [*([before] if before != ":" else []), "", "```python", *block, "```", ""]
        else:
            paragraph = [line]
            while line and lines and lines[0] and not lines[0].endswith("::") and not SECTION.match(lines[0]):
                paragraph.append(lines.pop(0))
            out.append(_inline("\n".join(paragraph), link))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _indented(lines: list[str]) -> list[str]:
    """Takes the indented lines at the beginning, without blank lines around them."""
    block = []
    while lines and (not lines[0] or lines[0].startswith(" ")):
        block.append(lines.pop(0))
    return inspect.cleandoc("\n".join(["", *block])).strip("\n").splitlines()


def _items(block: list[str], link: Link) -> Iterator[str]:
    """``name: text`` and the indented lines after it, as an entry of a list."""
    for item in re.split(r"\n(?=\S)", "\n".join(block)):
        names, colon, text = item.partition(": ")
        words = re.sub(r"\*{0,2}[\w.]+", r"`\g<0>`", names) if colon else names
        yield f"- {words}{colon}{_inline(inspect.cleandoc(text), link)}".replace("\n", "\n  ")
    yield ""


def _inline(text: str, link: Link) -> str:
    return re.sub(r"``(.+?)``|`([^`]+)`", lambda m: f"`{m[1]}`" if m[1] else link(m[2]), text, flags=re.DOTALL)


def listed(docstring: str) -> list[str]:
    """The attributes that a class's docstring describes."""
    section = re.search(r"^Attributes:\n((?: .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    names = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
    return [one for several in names for one in several.split(", ")]


def members_of(kind: type, chosen: str | None) -> Iterator[tuple[str, Any]]:
    """The public members that gradstat defines, in the order of the source, or those that are ``chosen``."""
    if chosen is None:
        return
    wanted = None if chosen == "all" else chosen.split(", ")
    seen = set()
    for base in kind.__mro__:
        for name, member in vars(base).items() if base.__module__.startswith("gradstat") else ():
            is_shown = name in wanted if wanted else not name.startswith("_")
            function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
            if is_shown and name not in seen and inspect.isfunction(inspect.unwrap(function)) and function.__doc__:
                seen.add(name)
                yield name, member


def described(name: str, is_made: bool, chosen: str | None, link_of: Callable[[str], Link]) -> str:
    """Heading, signature and text of a thing, and of its members."""
    found, short = thing(name), name.rpartition(".")[2]
    parts = [f"### `{name}`"]
    link = link_of(name)
    if not isinstance(found, type):
        parts += [_code(signature(short, found, False)), markdown(found.__doc__ or "", link)]
        return "\n\n".join(parts)
    is_error = issubclass(found, BaseException)
    if is_made and not is_error:
        parts.append(_code(signature(short, found, False)))
    bases = [base.__name__ for base in found.__bases__ if base is not object and not base.__name__.startswith("_")]
    if is_error:
        parts.append(f"A subclass of `{bases[0]}`.")
    parts.append(markdown(found.__doc__ or "", link))
    init = found.__dict__.get("__init__")
    if is_made and init is not None and init.__doc__ and not is_error:
        parts.append(markdown(init.__doc__, link))
    for key, member in members_of(found, chosen):
        parts.append(f"#### `{short}.{key}`")
        if isinstance(member, property) or hasattr(member, "func"):
            function = getattr(member, "fget", None) or member.func
            parts += [
                _code(f"{short}.{key}: {_type(inspect.signature(function).return_annotation)}"),
                markdown(function.__doc__ or "", link),
            ]
        else:
            function = getattr(member, "__func__", member)
            is_bound = not isinstance(member, staticmethod)
            parts += [_code(signature(f"{short}.{key}", function, is_bound)), markdown(function.__doc__ or "", link)]
    return "\n\n".join(part for part in parts if part)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def rendered() -> dict[Path, str]:
    """The text of each page."""
    texts = {page: page.read_text() for page in PAGES}
    places: dict[str, tuple[Path, str]] = {}  # by full name, members with that of their class
    for page, text in texts.items():
        places |= {name: (page, anchor(name)) for name in HEADING.findall(MARKED.sub("", text))}
        for _, name, _, chosen, _ in MARKED.findall(text):
            places[name], found, short = (page, anchor(name)), thing(name), name.rpartition(".")[2]
            if isinstance(found, type):
                places |= {f"{name}.{key}": (page, anchor(f"{short}.{key}")) for key, _ in members_of(found, chosen)}
                for key in listed(found.__doc__ or ""):
                    places.setdefault(f"{name}.{key}", (page, anchor(name)))

    def link_of(page: Path, owner: str) -> Link:
        def link(text: str) -> str:
            name = text.removesuffix("()").removeprefix("gradstat.")
            for near in (f"{owner}.{name}", f"{owner.rpartition('.')[0]}.{name}"):  # its own members, then its module
                if near in places:
                    found = {near: places[near]}
                    break
            else:
                found = {key: place for key, place in places.items() if key.endswith(f".{name}")}
                if len(set(found.values())) > 1:  # a class or a function rather than a member of one
                    found = {key: place for key, place in found.items() if key.split(".")[-2].islower()}
            if len(set(found.values())) == 1:
                where, target = next(iter(found.values()))
                return f"[`{text}`]({'' if where == page else where.name}#{target})"
            raise SystemExit(f"{page.name}, {owner}: `{text}` leads to {[*found] or 'nothing'}")

        return link

    def replaced(page: Path) -> Callable[[re.Match[str]], str]:
        def replace(m: re.Match[str]) -> str:
            text = described(m[2], not m[3], m[4], lambda owner: link_of(page, owner))
            return f"{m[1]}\n{text}\n\n{m[5]}"

        return replace

    return {page: MARKED.sub(replaced(page), text) for page, text in texts.items()}


if __name__ == "__main__":
    changed = {page: text for page, text in rendered().items() if page.read_text() != text}
    for page, text in changed.items():
        print(page.name, "is written" if "--write" in sys.argv else "differs")
        if "--write" in sys.argv:
            page.write_text(text)
    sys.exit(bool(changed) and "--write" not in sys.argv)
