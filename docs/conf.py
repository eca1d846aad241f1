"""How `make docs` turns these pages into a site. Nothing comes from a network."""

import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from gradstat import __version__
from gradstat.monitor import Rule

project = "gradstat"
author = "the authors of gradstat"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",  # the signatures and docstrings that pages of docs/api ask for
    "sphinx.ext.autosummary",  # the first lines of these docstrings, in a table
    "myst_nb",  # the pages, which are Markdown that reads well as it is, and the notebook with its outputs
    "sphinx_copybutton",
]
exclude_patterns = ["**.ipynb_checkpoints"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
copybutton_prompt_text = "$ "

default_role = "any"  # single backticks in docstrings are links, with a warning unless they lead to one place
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Array": "Array"}  # of properties, which `as_written` does not see
autosummary_generate = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_favicon = "_static/icon.svg"
html_title = f"gradstat {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False


# Pages at the root of the repository, and the pages of the site that show them.
ROOT = Path(__file__).parent.parent
AT_ROOT = {"README": "overview", "CHANGELOG": "changelog", "CONTRIBUTING": "contributing", "SECURITY": "security"}


def bring_from_root(app: Sphinx, page: str, source: list[str]) -> None:
    """Shows the pages at the root of the repository, and leads links among them and the others to where these are here.

    Everything is written so that links are good on a code host.
    """
    shown = {f"site/{here}": name for name, here in AT_ROOT.items()}.get(page)
    text = source[0] if shown is None else (ROOT / f"{shown}.md").read_text().replace("](docs/", "](../")
    for name, here in AT_ROOT.items():
        text = text.replace(f"]({name}.md", f"]({here}.md").replace(f"](../{name}.md", f"](site/{here}.md")
    source[0] = text


def as_written(app: Sphinx, function: Callable[..., Any], is_bound: bool) -> None:
    """Keeps autodoc from evaluating the types of a signature, so that aliases keep their names."""
    typing.no_type_check(getattr(function, "__func__", function))


# Used as an extension, napoleon would take what stands before a colon in the first line of a property for its type. It
# does not if it is told no name. Under "Returns" an empty type prevents the same.
SECTIONS = Config(napoleon_use_param=False, napoleon_attr_annotations=False)


def with_lists(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Makes lists of the sections of a docstring: "Args", "Attributes", "Returns", "Raises". A rule tells its name."""
    if what == "class" and issubclass(thing, Rule) and thing.name:
        lines[:0] = [f"``{thing.name}``, {thing.severity}.", ""]
    text = re.sub(r"^Returns:\n    ", r"\g<0>: ", "\n".join(lines), flags=re.MULTILINE)
    text = "\n".join(GoogleDocstring(text, SECTIONS, app, what, obj=thing).lines())
    attributes = re.compile(r"^\.\. attribute:: .*", re.MULTILINE)  # names that share a description: one on each line
    lines[:] = attributes.sub(lambda match: match[0].replace(", ", "\n" + " " * 15), text).splitlines()


def setup(app: Sphinx) -> None:
    app.connect("source-read", bring_from_root)
    app.connect("autodoc-before-process-signature", as_written)
    app.connect("autodoc-process-docstring", with_lists)
