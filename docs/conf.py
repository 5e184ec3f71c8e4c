"""Sphinx's configuration: `make docs` builds the pages of this folder into build/docs."""

from __future__ import annotations

import os
from typing import Any

# TensorFlow, which autodoc imports with tfcdo, describes the machine on standard error.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tfcdo.version import __version__

project = "tfcdo"
author = "the authors of tfcdo"
project_copyright = "the authors of tfcdo, Apache-2.0"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
# Anchors as GitHub makes them, so that a link works on both.
myst_heading_anchors = 3
# A prompt or the output below a command is not meant to be pasted.
copybutton_exclude = ".linenos, .gp, .go"

# Docstrings name things in single backquotes, of tfcdo or not.
default_role = "code"
autosummary_generate = True
autosummary_imported_members = True
autosummary_ignore_module_all = False
templates_path = ["_templates"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The type is in the signature.
napoleon_use_rtype = False
napoleon_use_ivar = True
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


def setup(app: Any) -> None:
    """Leaves out members of TensorFlow's, Keras's and Python's base classes."""
    app.connect("autodoc-skip-member", _skip_foreign)


def _skip_foreign(app: Any, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool:
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    module = getattr(function, "__module__", None) or ""
    return skip or not module.startswith("tfcdo")
