"""Configuration of the site; see scripts/docs.sh."""

project = "Rabbet"
author = "The Rabbet authors"
copyright = author
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
html_theme = "alabaster"
html_theme_options = {"description": "An engine put together from plugins", "fixed_sidebar": True}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
# Headings are link targets, as on the pages of a repository.
myst_heading_anchors = 4
