"""Settings of `make docs`."""

import os
import pathlib
import platform
import shutil
import sys

import jax

DOCS = pathlib.Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

# Sphinx reads nothing outside of its folder; a copy is as old as the notebook.
for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
    shutil.copy2(notebook, DOCS / "notebooks")

project = "jaxcomp"
author = copyright = "the jaxcomp authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "sphinx_design"]
exclude_patterns = ["_build"]

html_theme = "sphinx_book_theme"
html_title = "jaxcomp"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# The address of the repository, as https://github.com/OWNER/jaxcomp: adds "edit this page".
repository = os.environ.get("JAXCOMP_REPOSITORY", "")
html_theme_options = {
    "repository_url": repository,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_edit_page_button": bool(repository),
    "use_repository_button": bool(repository),
    "extra_footer": f"Built with JAX {jax.__version__} on Python {platform.python_version()}.",
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # else there are two fields to search by
}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"

# Docstrings write code in single backticks.
default_role = "code"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 70
napoleon_use_ivar = True
napoleon_use_rtype = False
