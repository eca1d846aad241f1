"""How `make docs` turns these pages into a site. Nothing comes from a network."""

from pathlib import Path

from sphinx.application import Sphinx

from gradstat import __version__

project = "gradstat"
author = "the authors of gradstat"
version = release = __version__

extensions = [
    "myst_nb",  # the pages, which are Markdown that reads well as it is, and the notebook with its outputs
    "sphinx_copybutton",
]
exclude_patterns = ["**.ipynb_checkpoints"]

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


def setup(app: Sphinx) -> None:
    app.connect("source-read", bring_from_root)
