"""Sphinx's configuration: `make docs` builds the pages of this folder into build/docs."""

from __future__ import annotations

import os

# TensorFlow, which autodoc imports with tfcdo, tells on standard error what machine this is.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tfcdo.version import __version__

project = "tfcdo"
author = "the authors of tfcdo"
project_copyright = "the authors of tfcdo, Apache-2.0"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
# Anchors as GitHub makes them, so that a link works on both.
myst_heading_anchors = 3
# A prompt or the output below a command is not what a reader wants to paste.
copybutton_exclude = ".linenos, .gp, .go"

# Docstrings name things in single backquotes, of tfcdo or not.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The type is in the signature.
napoleon_use_rtype = False
add_module_names = False
# Without it the list at the side repeats the class before each method.
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "tfcdo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
# Blocks without a language are drawings.
highlight_language = "text"
