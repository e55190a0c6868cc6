"""Settings of Sphinx; `make docs` builds."""

import hps_keras

project = "hps_keras"
author = "The hps_keras authors"
copyright = "The hps_keras authors"
release = hps_keras.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# In docstrings, `fit` in single quotes is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Settings of a dataclass are fields of its description rather than a second list of members.
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"hps_keras {release}"
