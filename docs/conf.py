"""The documentation site: `sphinx-build -W -c docs . build/site` in an environment with the extra `docs`.

The source folder is the root of the repository, so that a relative link, such as `../notebooks/01_a_note.ipynb`, leads to
the same file here and on GitHub. Notebooks become pages with their stored outputs; nothing is run. No page makes a request to
another host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))

import openmed_nb  # noqa: E402 - the folder of the extension comes first

project = "openmed_nb"
author = "the authors of openmed_nb"
project_copyright = author
version = release = openmed_nb.__version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "openmed_docs",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "*.md", "openmed_nb/models/bundled/*/README.md"]
exclude_patterns = ["docs/_*", "docs/examples", "**/.*"]
# Sphinx does not look into these folders, which may contain environments and builds.
SEARCHED = {"docs", "notebooks", "openmed_nb"}
exclude_patterns += [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in SEARCHED]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
# A widget needs a kernel. The page shows the HTML that is stored beside it.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None), ("html", "text/html", 10)]
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "openmed_nb"
html_static_path = ["_static"]
html_search_scorer = str(DOCS / "_ext" / "search_scorer.js")
html_css_files = ["openmed_docs.css"]
html_js_files = ["openmed_docs.js"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["_root"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "openmed_nb"},
    "navbar_align": "left",
    "header_links_before_dropdown": 4,
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"docs/index": []}

# The address of the repository is known where GitHub builds the site. A link requests nothing until it is clicked.
repository = os.environ.get("GITHUB_REPOSITORY", "")
binder_repository = repository
if repository:
    html_theme_options["external_links"] = [
        {"name": "Run on Binder", "url": f"https://mybinder.org/v2/gh/{repository}/HEAD?labpath=notebooks"},
        {"name": "GitHub", "url": f"https://github.com/{repository}"},
    ]
    html_theme_options["header_links_before_dropdown"] = 6
