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
nitpick_ignore_regex = [("py:(class|exc)", r"(?!gradstat).*")]

# As they are written, and not the unions that they stand for.
autodoc_type_aliases = {"ExtraGroups": "ExtraGroups", "Policies": "Policies"}
autodoc_member_order = "bysource"
autoclass_content = "both"
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
    method of another class (``Report.worst``), or put brackets behind a function.
    """
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"]).removesuffix("()")
    ending = "." + (target.rpartition(".")[2] if target.startswith("gradstat.") else target)
    # Things have their module's name, too, by which they are defined: one place all the same.
    places = {
        (thing.docname, thing.node_id): name
        for name, thing in env.domains["py"].objects.items()
        if name.endswith(ending)
    }
    if len(places) > 1:  # a class or a function rather than a member of one
        places = {place: name for place, name in places.items() if name.split(".")[-2].islower()}
    if len(places) != 1:
        return None
    (((docname, anchor), name),) = places.items()
    link = nodes.reference("", "", text, internal=True, reftitle=name)
    link["refuri"] = f"{app.builder.get_relative_uri(node['refdoc'], docname)}#{anchor}"
    return link


def setup(app: Sphinx) -> None:
    GoogleDocstring._consume_returns_section = returned  # type: ignore[method-assign]
    app.connect("source-read", bring_from_root)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("missing-reference", find_by_name)
