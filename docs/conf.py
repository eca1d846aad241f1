"""How `make docs` turns these pages and the docstrings of gradstat into a site. Nothing comes from a network."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import GoogleDocstring

from gradstat import __version__

project = "gradstat"
author = "the authors of gradstat"
version = release = __version__

extensions = [
    "myst_nb",  # the pages, which are Markdown that reads well as it is, and the notebook with its outputs
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["**.ipynb_checkpoints"]

# Docstrings put names of gradstat in single backticks, and everything else in double ones. Such a name has to lead
# somewhere; types of others, in signatures, need not.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:(class|exc|obj)", r"(?!gradstat).*")]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
copybutton_prompt_text = "$ "

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


def keep_colons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keeps napoleon from taking what is before a colon for a type: types are in signatures, colons part sentences."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def returned(docstring: GoogleDocstring, preprocess_types: bool = False) -> list[tuple[str, str, list[str]]]:
    """The section on what is returned, likewise as it stands."""
    return [("", "", docstring._dedent(docstring._consume_to_next_section()))]


def find_by_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement) -> Any:
    """Finds what docstrings and signatures name otherwise than the reference does: by its last name, if there is one.

    A type in a signature comes with the module that defines it (``gradstat.report.Report``), a docstring may name a
    method of another class, or put brackets behind a function.
    """
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"]).removesuffix("()")
    if "." in target and not target.startswith("gradstat"):
        candidates = [name for name in env.domains["py"].objects if name.endswith("." + target)]
    else:
        last = target.rpartition(".")[2]
        candidates = [name for name in env.domains["py"].objects if name.rpartition(".")[2] == last]
    if len(candidates) > 1:
        nearest = [name for name in candidates if name.rpartition(".")[0].rpartition(".")[2].islower()]
        candidates = nearest if len(nearest) == 1 else []
    if not candidates:
        return None
    found = env.domains["py"].objects[candidates[0]]
    link = nodes.reference("", "", text, internal=True, reftitle=candidates[0])
    link["refuri"] = f"{app.builder.get_relative_uri(node['refdoc'], found.docname)}#{found.node_id}"
    return link


def setup(app: Sphinx) -> None:
    GoogleDocstring._consume_returns_section = returned  # type: ignore[method-assign]
    app.connect("source-read", bring_from_root)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("missing-reference", find_by_name)
