"""How Sphinx builds the site of this folder: `make docs`."""

from importlib.metadata import version as version_of

project = "Paceline"
author = "The Paceline authors"
release = version_of("paceline")
version = release

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["_build"]
nitpicky = True

myst_heading_anchors = 4  # links to headings, as GitHub makes their names
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "Paceline"
html_show_sphinx = False
