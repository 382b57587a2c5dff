"""Sphinx's settings: `make docs` builds the site into build/docs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generated  # noqa: E402

import fastformer  # noqa: E402

project = "fastformer"
author = "the authors of fastformer"
project_copyright = "the authors of fastformer"
release = version = fastformer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_*", "*.py"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "code"  # single backticks in docstrings are code, as in Markdown

smartquotes = False  # "--flag" keeps both hyphens, and code its quotes

html_theme = "furo"
html_title = f"fastformer {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["ref.python"]  # a signature's bare `Transformer` may be any of several classes

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False

# The site builds without a network, so names of other libraries have no page to link to. Neither have the internal
# types in a signature.
nitpick_ignore_regex = [("py:.*", r"(?!fastformer\b).*"), ("py:class", ".*")]

_NAMED = re.compile(r"    \w+: ")


def as_rst(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings indent code as Markdown does, and name several return values line by line; docutils needs signs."""
    made: list[str] = []
    section = ""
    named = sum(bool(_NAMED.match(line)) for line in _section(lines, "Returns:"))
    for line in lines:
        if line and not line.startswith(" "):
            section = line
        is_code = line.startswith("    ") and made and not made[-1] and not section.endswith((":", "::"))
        if is_code and not any(each.startswith("    ") for each in made[-2:-1]):
            made += ["::", ""]
        if section == "Returns:" and named > 1:
            if line == section:
                line = "**Returns:**\n"
            elif line:
                line = f"- {line[4:]}" if _NAMED.match(line) else f"  {line.strip()}"
        made += line.split("\n")
    lines[:] = made


def _section(lines: list[str], title: str) -> list[str]:
    """The lines of a section of a docstring."""
    if title not in lines:
        return []
    rest = lines[lines.index(title) + 1 :]
    return rest[: next((i for i, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))]


def plain_annotations(app: Any, what: str, name: str, obj: object, options: Any, signature: str, result: str) -> Any:
    """A signature without the bounds and conversions that `Annotated` carries: the settings' tables have them."""
    if signature and "Annotated[" in signature:
        signature = re.sub(
            r"(?:\w+\.)*Annotated\[((?:[^\[\],]|\[[^\]]*\])+), (?:[^\[\]]|\[[^\]]*\])*?\]", r"\1", signature
        )
    return signature, result


def setup(app: Any) -> None:
    """Makes the generated pages before Sphinx looks for files."""
    app.connect("config-inited", lambda app, config: generated.write(Path(app.srcdir)))
    app.connect("autodoc-process-docstring", as_rst, priority=1)  # before napoleon
    app.connect("autodoc-process-signature", plain_annotations)
