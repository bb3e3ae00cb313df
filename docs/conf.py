"""How the documentation is built: `make docs`."""

project = "pondertime"
author = "The pondertime authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "pondertime"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]
