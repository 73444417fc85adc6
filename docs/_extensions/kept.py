"""Directive and role for figures of the kept results: see ``bench/_kept.py``.

``{kept} NAME`` is a table, ``{kept}`NAME: case | metric | field``` one figure in a line.
"""

import re
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from bench import _kept


class KeptTable(SphinxDirective):
    """A table made from a kept result."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"class": directives.class_option}

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        spec = "\n".join(self.content)
        for file in (name, *re.findall(r'\bfile = "([^"]+)"', spec)):
            self.env.note_dependency(str(_kept.path_of(file)))
        try:
            text = _kept.table(name, spec)
        except ValueError as error:
            raise self.error(str(error)) from error
        return self.parse_text_to_nodes(text)


class Kept(SphinxRole):
    """One figure of a kept result: ``NAME: case | metric | field | digits``."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        name, _, address = self.text.partition(": ")
        parts = [part.strip() for part in address.split(" | ")]
        try:
            case, metric, *rest = parts
            field, digits = (*rest, *("value", "3")[len(rest) :])
            text = _kept.figure(name, case, metric, field, int(digits))
        except ValueError as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [nodes.Text(self.text)], [message]
        return [nodes.Text(text)], []


def setup(app: Sphinx) -> dict[str, Any]:
    """Adds the directive and the role to Sphinx."""
    app.add_directive("kept", KeptTable)
    app.add_role("kept", Kept())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
