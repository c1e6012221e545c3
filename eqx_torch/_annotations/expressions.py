"""Which names a symbolic dimension needs, known before any call.

jaxtyping evaluates `{self.width}-n` in two steps: the braces as a Python f-string over the
arguments, then the text over the bound dimensions. Both are Python, so Python's own parser finds
the names.
"""

import ast
import builtins


def argument_names(expression: str) -> set[str]:
    """The arguments that the braces in `expression` mention. Raises SyntaxError."""
    return _names(ast.parse(f"f'{expression}'", mode="eval"))


def dimension_names(expression: str) -> set[str]:
    """The dimensions that `expression` mentions.

    None if only the values in its braces will make it an expression. Raises SyntaxError.
    """
    formatted = ast.parse(f"f'{expression}'", mode="eval").body
    if not isinstance(formatted, ast.JoinedStr):
        return set()
    text = "".join(
        str(part.value) if isinstance(part, ast.Constant) else "1" for part in formatted.values
    )
    try:
        return _names(ast.parse(text, mode="eval"))
    except SyntaxError:
        if "{" in expression:
            return set()
        raise


def _names(tree: ast.AST) -> set[str]:
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {name for name in found if not hasattr(builtins, name)}
