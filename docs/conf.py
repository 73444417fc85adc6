"""Settings of the documentation: `make docs` builds it."""

import os
import pathlib
import sys
from importlib import metadata

from jupyter_cache import get_cache

HERE = pathlib.Path(__file__).parent
# The benchmarks' kept results are in the checkout, not in the package.
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

# Pages are executed in processes of their own, which inherit the environment.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYTHONPATH"] = str(HERE.parent)
os.environ["PATH"] = os.pathsep.join(
    [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
)

project = "jaxdp"
author = "The jaxdp authors"
copyright = author
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
    "kept",
]
exclude_patterns = ["_build", "_extensions"]
suppress_warnings = ["config.cache"]

html_theme = "sphinx_book_theme"
html_title = "jaxdp"
html_static_path = ["_static"]
html_css_files = ["jaxdp.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}

myst_enable_extensions = [
    "amsmath",
    "colon_fence",
    "deflist",
    "dollarmath",
    "fieldlist",
]
myst_heading_anchors = 3

# A page is executed again when its cells have changed, or everything with `make clean`.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "cache")
# Made here, once: the processes that read pages would race for it.
get_cache(nb_execution_cache_path).list_cache_records()
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Privacy", "Guarantee"]
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_exclude = ".linenos, .gp, .go"

# Inventories come from the network: a build that is to stand alone does without.
if os.environ.get("DOCS_ONLINE"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/stable", None),
    }
# Served by a project's host, and checked by `make docs-links` where there is a network.
linkcheck_retries = 2
linkcheck_anchors = False
