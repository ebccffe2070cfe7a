"""The directive `measured`: a table of `benchmarks.tables`, made when the pages are built.

    ```{measured} convergence
    :task: nano

    0/1 Adam*
    dense Adam
    ```

Its argument is a key of `tables.TABLES`, its lines are patterns of methods' names; none is all.
"""

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from benchmarks import tables


class Measured(SphinxDirective):
    """Parses the table in the page's own language."""

    required_arguments = 1
    option_spec = {"task": directives.unchanged, "steps": int}
    has_content = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.env.note_dependency(str(tables.path_of(name)))
        return self.parse_text_to_nodes(tables.table(name, list(self.content), **self.options))


def setup(app) -> dict:
    """Called by sphinx."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True}
