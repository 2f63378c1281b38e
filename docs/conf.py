"""Sphinx reads the docstrings of the installed package."""

import activations_cuda

project = "activations_cuda"
version = release = activations_cuda.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx-mathjax-offline"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2  # links lead to sections
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
add_module_names = False  # functions and modules are the package's own attributes
