"""Settings of `make docs`."""

import pathlib
import shutil
import sys

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

# Sphinx reads nothing outside of its folder; a copy is as old as the notebook.
for notebook in (DOCS.parent / "notebooks").glob("*.ipynb"):
    shutil.copy2(notebook, DOCS / "notebooks")

project = "jaxcomp"
author = copyright = "the jaxcomp authors"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "measured"]
exclude_patterns = ["_build"]

html_theme = "sphinx_book_theme"
html_title = "jaxcomp"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # else there are two fields to search by
}

myst_enable_extensions = ["dollarmath"]
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
