"""Sphinx: ``sphinx-build -W docs BUILD``, or ``ci/docs.sh BUILD``, where pybnorm is installed; nothing is fetched."""

import importlib.util
import sys
from pathlib import Path

import pybnorm

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks; pybnorm is the one that is installed

project = "pybnorm"
author = "The pybnorm developers"
project_copyright = author
version = release = pybnorm.__version__
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # the role autolink
    "sphinx.ext.viewcode",  # [source]
    "tables",  # beside this file
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_mock_imports = [] if importlib.util.find_spec("torch") else ["torch"]
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
html_theme = "pydata_sphinx_theme"
html_title = f"pybnorm {version}"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "use_edit_page_button": False,
    "navbar_center": [],  # too many pages for a line: all are at the side
    "article_header_start": [],
}
html_static_path = ["_static"]
html_css_files = ["cards.css"]
templates_path = ["_templates"]
html_sidebars = {"**": ["pages.html"]}
html_context = {"default_mode": "auto"}
html_show_sourcelink = False
default_role = "autolink"  # a link where the name is one of ours
