"""Settings of the documentation: `make docs` builds it."""

import os
from importlib import metadata

# Every page is executed on the CPU, wherever it is built.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "jaxdp"
author = "The jaxdp authors"
copyright = "The jaxdp authors"
version = release = metadata.version("jaxdp-optim")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

html_theme = "sphinx_book_theme"
html_title = "jaxdp"
html_theme_options = {"show_toc_level": 2, "use_download_button": False}

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
