"""PTX as text: the parser, its dataclasses, basic blocks."""
