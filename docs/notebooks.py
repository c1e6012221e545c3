"""Makes a notebook of each example, beside the page that shows it.

A hook of mkdocs. jupytext takes paragraphs of comments for text and all else for code; the
docstring at the top of a script becomes text too. A script that starts processes has no notebook.
"""

import ast
import re
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files


EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {path.stem: path for path in sorted(EXAMPLES.glob("*.py"))}
for name in ("multi_process", "readme"):
    del SCRIPTS[name]


def notebook(script: str) -> Any:
    """The notebook of a script."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    code = re.sub(r'\A""".*?"""\n', "", script, flags=re.DOTALL)
    title, _, rest = docstring.partition("\n")
    text = "\n".join(f"# {line}".rstrip() for line in [f"# {title}", *rest.splitlines()])
    if "PICTURE = " in script:
        code += "\nfrom IPython.display import Image\n\nImage(PICTURE)\n"
    made = jupytext.reads(f"{text}\n\n{code}", fmt="py:light")
    for cell in made.cells[1:]:
        if cell.cell_type == "markdown" and len(cell.source) < 40:  # the title of a section
            cell.source = f"## {cell.source}"
    return made


def on_files(files: Files, config: Any) -> Files:
    """Adds `examples/NAME.ipynb` to the site for each script."""
    for name, path in SCRIPTS.items():
        content = jupytext.writes(notebook(path.read_text()), fmt="ipynb")
        files.append(File.generated(config, f"examples/{name}.ipynb", content=content))
    return files
