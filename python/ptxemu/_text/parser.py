"""Reads PTX (PTX ISA 9.0, 4 and 5): text to ``syntax.Module``.

Braces inside a function open a scope: registers and labels declared there are its own, so that
inline assembly may declare the same names again. Whatever the parser does not know stops with a
``PtxSyntaxError`` and the line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from .._errors import PtxSyntaxError
from .syntax import (
    Address,
    Branch,
    Constant,
    Function,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
    type_bits,
)

__all__ = ["parse"]

_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<newline>\n)"
    r'|(?P<string>"[^"\n]*")'
    r"|(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?"
    r"|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)"
    r"|(?P<word>[.%$_A-Za-z][\w$.]*(?:::[\w$.]+)*)"
    r"|(?P<mark>[-{}()\[\],;:@!|+<>=])",
    re.DOTALL,
)

#: Linkage and other words before a declaration that change nothing here.
_LINKAGE = {".visible", ".weak", ".common"}

_SPACES = {".global", ".const", ".shared", ".local"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass
class _Scope:
    """A brace's names, as they are unique in the function."""

    parent: _Scope | None
    suffix: str
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


@dataclass(frozen=True)
class _Statement:
    scope: _Scope
    opcode: str
    tokens: list[_Token]
    guard: str
    negated: bool
    line: int


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
        PtxSyntaxError: With the line of what it did not understand.
    """
    return _Parser(text).module()


def _fail(token: _Token, message: str) -> NoReturn:
    raise PtxSyntaxError(f"line {token.line}: {message}")


def _tokens(text: str) -> Iterator[_Token]:
    line, at = 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != at:
            break
        at = match.end()
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind == "space":
            line += match.group().count("\n")
        else:
            yield _Token(kind, match.group(), line)
    if at != len(text):
        raise PtxSyntaxError(f"line {line}: {text[at : at + 20]!r} is no token")
    yield _Token("end", "", line)


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = list(_tokens(text))
        self.at = 0
        self.result = Module("", "", [], {}, text.split("\n"))

    @property
    def here(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            _fail(token, "the text ends in the middle of a declaration")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.here.text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        token = self.take()
        if token.text != text:
            _fail(token, f"{token.text!r} where {text!r} is needed")

    def rest_of_line(self) -> list[str]:
        line, found = self.here.line, []
        while self.here.kind != "end" and self.here.line == line:
            found.append(self.take().text)
        return found

    def statement(self) -> list[_Token]:
        found = []
        while not self.accept(";"):
            found.append(self.take())
        return found

    def integer(self) -> int:
        token = self.take()
        if token.kind != "number":
            _fail(token, f"{token.text!r} where a number is needed")
        return int(_number(token.text).value)

    def module(self) -> Module:
        while self.here.kind != "end":
            token = self.take()
            if token.text == ".version":
                self.result.version = self.take().text
            elif token.text == ".target":
                self.result.target = " ".join(self.rest_of_line())
            elif token.text == ".address_size":
                if self.integer() != 64:
                    _fail(token, "only addresses of 64 bits are supported")
            elif token.text in _LINKAGE:
                continue
            elif token.text in (".entry", ".func"):
                self.function(token.text == ".entry")
            elif token.text == ".extern" and self.here.text == ".func":
                self.statement()
            elif token.text == ".extern":
                self.result.variables.append(self.variable(self.take(), extern=True))
            elif token.text in _SPACES:
                self.result.variables.append(self.variable(token))
            elif token.text in (".file", ".loc"):
                self.rest_of_line()
            elif token.text == ".section":
                while self.take().text != "}":
                    pass
            elif token.text in (".pragma", ".alias"):
                self.statement()
            else:
                _fail(token, f"{token.text!r} is no declaration")
        return self.result

    def variable(self, space: _Token, extern: bool = False) -> Variable:
        """Reads what follows a state space: type, name, size, initial bytes."""
        if space.text not in _SPACES:
            _fail(space, f"{space.text!r} is no state space")
        align, lanes, element, name = 0, 1, "", ""
        for token in iter(self.take, None):
            if token.text == ".align":
                align = self.integer()
            elif token.text in (".v2", ".v4"):
                lanes = int(token.text[2:])
            elif token.text.startswith("."):
                element = token.text[1:]
            else:
                name = token.text
                break
        size = lanes * (type_bits(element) + 7) // 8
        unit = size
        while self.accept("["):
            size *= 0 if self.here.text == "]" else self.integer()
            self.expect("]")
        initial = b""
        if self.accept("="):
            initial = self.initial(element).ljust(size, b"\0")
        self.expect(";")
        return Variable(name, space.text[1:], size, align or unit, initial, extern)

    def initial(self, element: str) -> bytes:
        """Reads an initializer's numbers."""
        depth, found = 0, b""
        bits = type_bits(element)
        while True:
            token = self.take()
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                depth -= 1
            elif token.kind == "number" or token.text == "-":
                literal = _number(token.text if token.text != "-" else "-" + self.take().text)
                found += _literal_bytes(literal, bits)
            elif token.text != ",":
                _fail(token, f"{token.text!r} in an initializer; only numbers are supported")
            if depth == 0:
                return found

    def function(self, is_entry: bool) -> None:
        if not is_entry and self.accept("("):
            while self.take().text != ")":
                pass
        name = self.take()
        function = Function(name.text, name.line, is_entry)
        if self.accept("("):
            self.parameters(function)
        while self.here.text not in ("{", ";"):
            directive = self.take()
            values = []
            while self.here.kind == "number":
                values.append(self.integer())
                self.accept(",")
            function.directives[directive.text[1:]] = tuple(values)
        if not self.accept(";"):
            self.expect("{")
            _Body(self, function).read()
            self.result.functions[function.name] = function

    def parameters(self, function: Function) -> None:
        offset = 0
        while not self.accept(")"):
            align, size, name, dimension = 0, 0, "", 1
            while self.here.text not in (",", ")"):
                token = self.take()
                if token.text == ".align":
                    align = align or self.integer()
                elif token.text == ".ptr":
                    while self.here.text.startswith("."):
                        if self.take().text == ".align":
                            self.integer()
                elif token.text == "[":
                    dimension = self.integer()
                    self.expect("]")
                elif token.text.startswith("."):
                    if token.text not in (".param", ".reg"):
                        size = (type_bits(token.text[1:]) + 7) // 8
                else:
                    name = token.text
            self.accept(",")
            align = align or size
            offset = -(-offset // align) * align
            function.parameters.append(Parameter(name, size * dimension, align, offset))
            offset += size * dimension


class _Body:
    """Reads a function's body: first all statements, then, with every label known, operands."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.parser = parser
        self.function = function
        self.statements: list[_Statement] = []
        self.tables: list[tuple[str, _Scope, list[_Token]]] = []
        self.scopes = 0
        self.scope = _Scope(None, "")

    def read(self) -> None:
        while True:
            token = self.parser.take()
            if token.text == "}":
                if self.scope.parent is None:
                    break
                self.scope = self.scope.parent
            elif token.text == "{":
                self.scopes += 1
                self.scope = _Scope(self.scope, f"#{self.scopes}")
            elif token.text.startswith("."):
                self.directive(token)
            elif token.kind == "word" and self.parser.accept(":"):
                self.label(token)
            elif token.text != ";":
                self.instruction(token)
        for name, scope, tokens in self.tables:
            targets = [t for t in tokens if t.text != ","]
            self.function.tables[name] = Branch(
                tuple(self.function.labels[self.target(scope, t)] for t in targets)
            )
        self.function.code = [self.resolve(statement) for statement in self.statements]

    def target(self, scope: _Scope, token: _Token) -> str:
        name = scope.label(token.text)
        if name is None:
            _fail(token, f"{token.text!r} is no label")
        return name

    def label(self, token: _Token) -> None:
        name = token.text + self.scope.suffix
        if token.text in self.scope.labels:
            _fail(token, f"label {token.text!r} stands twice in its scope")
        self.scope.labels[token.text] = name
        self.function.labels[name] = len(self.statements)
        if self.parser.here.text == ".branchtargets":
            self.parser.take()
            self.tables.append((name, self.scope, self.parser.statement()))

    def directive(self, token: _Token) -> None:
        if token.text == ".reg":
            self.registers()
        elif token.text in _SPACES:
            variable = self.parser.variable(token)
            self.function.variables.append(variable)
        elif token.text == ".loc":
            self.parser.rest_of_line()
        elif token.text == ".pragma":
            self.parser.statement()
        else:
            _fail(token, f"{token.text!r} inside a function is not supported")

    def registers(self) -> None:
        kind = self.parser.take()
        bits = type_bits(kind.text[1:])
        while True:
            name = self.parser.take().text
            if self.parser.accept("<"):
                names = [f"{name}{i}" for i in range(self.parser.integer())]
                self.parser.expect(">")
            else:
                names = [name]
            for entry in names:
                self.scope.registers[entry] = Register(entry + self.scope.suffix, bits)
            if self.parser.accept(";"):
                return
            self.parser.expect(",")

    def instruction(self, token: _Token) -> None:
        guard, negated, line = "", False, token.line
        if token.text == "@":
            negated = self.parser.accept("!")
            guard = self.parser.take().text
            token = self.parser.take()
        if token.kind != "word":
            _fail(token, f"{token.text!r} where an instruction is needed")
        tokens = self.parser.statement()
        self.statements.append(_Statement(self.scope, token.text, tokens, guard, negated, line))

    def resolve(self, statement: _Statement) -> Instruction:
        guard = None
        if statement.guard:
            guard = statement.scope.register(statement.guard)
            if guard is None:
                raise PtxSyntaxError(f"line {statement.line}: {statement.guard!r} is no register")
        operands = _Operands(statement.scope, statement.tokens, statement.line).all()
        return Instruction(
            statement.opcode, tuple(operands), guard, statement.negated, statement.line
        )


class _Operands:
    """Reads the operands of one instruction."""

    def __init__(self, scope: _Scope, tokens: list[_Token], line: int) -> None:
        self.scope = scope
        self.tokens = [*tokens, _Token("end", "", line)]
        self.at = 0

    def all(self) -> list[Operand]:
        found: list[Operand] = []
        while self.tokens[self.at].kind != "end":
            found.append(self.operand())
            if not self.accept(",") and self.tokens[self.at].kind != "end":
                token = self.tokens[self.at]
                _fail(token, f"{token.text!r} where ',' or ';' is needed")
        return found

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text == text:
            self.at += 1
            return True
        return False

    def operand(self) -> Operand:
        first = self.simple()
        if self.accept("|"):
            return Pair(first, self.simple())
        return first

    def simple(self) -> Operand:
        token = self.tokens[self.at]
        self.at += 1
        if token.text == "[":
            return self.address()
        if token.text == "{":
            return Vector(tuple(self.until("}")))
        if token.text == "-":
            literal = self.tokens[self.at]
            self.at += 1
            return _number("-" + literal.text)
        if token.text == "!":
            register = self.simple()
            if not isinstance(register, Register):
                _fail(token, "'!' before something that is no register")
            return Negated(register)
        if token.kind == "number":
            return _number(token.text)
        if token.kind != "word":
            _fail(token, f"{token.text!r} is no operand")
        return self.word(token)

    def word(self, token: _Token) -> Operand:
        if token.text == "_":
            return Sink()
        register = self.scope.register(token.text)
        if register is not None:
            return register
        if token.text.startswith("%"):
            return Special(token.text)
        label = self.scope.label(token.text)
        if label is not None:
            return Label(label)
        return Symbol(token.text, self.displacement())

    def displacement(self) -> int:
        total = 0
        while self.tokens[self.at].text in ("+", "-"):
            sign = -1 if self.tokens[self.at].text == "-" else 1
            self.at += 1
            if self.tokens[self.at].text == "-":
                sign, self.at = -sign, self.at + 1
            total += sign * int(_number(self.tokens[self.at].text).value)
            self.at += 1
        return total

    def until(self, end: str) -> list[Operand]:
        found = []
        while not self.accept(end):
            found.append(self.operand())
            self.accept(",")
        return found

    def address(self) -> Address:
        base = self.simple()
        offset = self.displacement()
        coordinates: tuple[Operand, ...] = ()
        if self.accept(","):
            inner = self.simple()
            if not isinstance(inner, Vector):
                _fail(self.tokens[self.at], "coordinates stand in braces")
            coordinates = inner.elements
        if not self.accept("]"):
            _fail(self.tokens[self.at], f"{self.tokens[self.at].text!r} where ']' is needed")
        return Address(base, offset, coordinates)


def _number(text: str) -> Constant:
    """Reads a literal (PTX ISA 9.0, 4.5)."""
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("-").rstrip("U")
    kind = digits[:2].lower()
    if kind in ("0f", "0d"):
        bits = 32 if kind == "0f" else 64
        value = int(digits[2:], 16) ^ (1 << (bits - 1) if sign < 0 else 0)
        return Constant(value, bits)
    if kind == "0x":
        return Constant(sign * int(digits[2:], 16))
    if kind == "0b":
        return Constant(sign * int(digits[2:], 2))
    if re.search(r"[.eE]", digits):
        return Constant(sign * float(digits))
    octal = len(digits) > 1 and digits.startswith("0")
    return Constant(sign * int(digits, 8 if octal else 10))


def _literal_bytes(literal: Constant, bits: int) -> bytes:
    if isinstance(literal.value, float):
        return struct.pack("<f" if bits == 32 else "<d", literal.value)
    return (literal.value % (1 << bits)).to_bytes(bits // 8, "little")
