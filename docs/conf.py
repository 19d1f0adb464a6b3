"""Sphinx: ``sphinx-build -W docs BUILD``, or ``ci/docs.sh BUILD``, where pybnorm is installed.

Nothing is fetched but with ``-t online``: then names of Python, NumPy and PyTorch are links to their pages.
"""

import importlib.util
import sys
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

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
    "sphinx_copybutton",
    "shown",  # this and the next are beside this file
    "tables",
]
if "online" in tags:  # type: ignore[name-defined]  # noqa: F821 - Sphinx brings it
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # of what is copied neither prompts nor output
copybutton_prompt_is_regexp = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_mock_imports = [] if importlib.util.find_spec("torch") else ["torch"]
numpydoc_show_class_members = False
numpydoc_xref_param_type = True  # types are links
numpydoc_xref_aliases = {} if "online" in tags else {name: name for name in DEFAULT_LINKS}  # type: ignore[name-defined]  # noqa: F821
numpydoc_xref_ignore = {"of", "or", "default", "optional", "shape", "array", "as", "in", "the", "one", "dtype"}
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
