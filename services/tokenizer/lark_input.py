r"""Rewrites a client's Lark grammar of a text for that text inside a JSON string.

Models write the input of a custom tool as they write all arguments: as JSON, in which a line break
is `\n` and a quote `\"`. So every terminal gets these escapes in place of the characters that JSON
does not allow; the rules above the terminals stay as they are.

llguidance takes the longest terminal and never backtracks: at the backslash of `\n` it would follow
a terminal that may continue with `\"`. So a terminal that ends in a run of characters, as `/.*/`
does, becomes a rule in which every escape is a terminal of its own.
"""

from __future__ import annotations

import json
import re
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from services.tokenizer.lark import literal

MAX_LENGTH: Final = 16 << 10
_ESCAPED: Final = "".join(map(chr, range(32))) + '"\\'
_PLAIN: Final = r'[^"\\\x00-\x1f]'
_ESCAPED_ONLY: Final = re.compile(r"(?:\\U000000(?:[01][0-9a-f]|22|5c))+")
_TOKEN = re.compile(
    r"""
    (?P<skip>(?:\#|//)[^\n]*)
    | (?P<range>"(?:\\.|[^"\\])+"\s*\.\.\s*"(?:\\.|[^"\\])+")
    | (?P<text>"(?:\\.|[^"\\])*")(?P<insensitive>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    | %import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<several>[\w\s,]+)\))
    | %ignore\s+(?:(?P<ignored>[A-Z]\w*)|/(?P<ignored_regex>(?:\\.|[^/\\])+)/)
    | (?P<foreign>%(?!ignore\b)\w+|<[^>\n]*>|@\w+|~(?!\s*\d)|::)
    """,
    re.VERBOSE,
)
_DEFINITION = re.compile(r"^[ \t]*([A-Z]\w*)[ \t]*:((?:.|\n(?=[ \t]*\|))*)", re.MULTILINE)
_NAME = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\b[A-Z]\w*')
_RUN = re.compile(r"\brun_\d")
# The terminals of `%import common`, as Lark defines them.
_COMMON: Final = {
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+",
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_FLAGS: Final = {"i": re.I, "m": re.M, "s": re.S, "x": re.X, "l": 0, "u": 0}
_CATEGORIES: Final = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}


def in_json_string(lark: str) -> str:
    """Return the grammar of the string's content; ValueError says what cannot be rewritten."""
    if len(lark) > MAX_LENGTH:
        raise ValueError(f"it is longer than {MAX_LENGTH} characters")
    runs: list[str] = []
    text = _TOKEN.sub(lambda token: _rewritten(token, runs), lark)
    return "\n".join((_without_terminals_of_rules(text), *runs))


def _rewritten(token: re.Match[str], runs: list[str]) -> str:
    if token["foreign"]:
        raise ValueError(f"{token['foreign']} is not known in the grammar of a tool's input")
    if token["range"]:
        first, last = (_unquoted(part) for part in re.findall(r'"(?:\\.|[^"\\])+"', token["range"]))
        if len(first) != 1 or len(last) != 1:
            raise ValueError(f"{token['range']} is no range of characters")
        return _terminal(f"[{re.escape(first)}-{re.escape(last)}]", 0, runs)
    if token["text"]:
        text = _unquoted(token["text"])
        if token["insensitive"]:
            return _terminal(re.escape(text), re.I, runs)
        return literal(json.dumps(text, ensure_ascii=False)[1:-1])
    if token["regex"]:
        flags = sum(_FLAGS[flag] for flag in set(token["flags"]))
        return _terminal(token["regex"], flags, runs)
    if token["ignored"] or token["ignored_regex"]:
        pattern = token["ignored_regex"] or _common(token["ignored"])
        return f"%ignore /{_sequence(*_parsed(pattern, 0))}/"
    names = [token["one"]] if token["one"] else re.findall(r"\w+", token["several"] or "")
    return "\n".join(
        f"{token['alias'] or name}: {_terminal(_common(name), 0, runs)}" for name in names
    )


def _without_terminals_of_rules(text: str) -> str:
    """Turn terminals that now consist of rules into rules, by giving them rule names."""
    definitions: dict[str, str] = dict(_DEFINITION.findall(text))
    rules: set[str] = set()
    while more := {
        name
        for name, body in definitions.items()
        if name not in rules and (_RUN.search(body) or rules & set(_NAME.findall(body)))
    }:
        rules |= more
    return _NAME.sub(lambda name: f"t_{name[0].lower()}" if name[0] in rules else name[0], text)


def _unquoted(text: str) -> str:
    try:
        unquoted: str = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", text))
    except ValueError as error:
        raise ValueError(f"{text} is no string: {error}") from error
    return unquoted


def _common(name: str) -> str:
    if name not in _COMMON:
        raise ValueError(f"common.{name} is not known; {', '.join(_COMMON)} are")
    return _COMMON[name]


def _terminal(pattern: str, flags: int, runs: list[str]) -> str:
    """Write a regular expression; a run of characters at its end becomes a rule in `runs`."""
    nodes, flags = _parsed(pattern, flags)
    while len(nodes) == 1 and nodes[0][0] is ops.SUBPATTERN and nodes[0][1][1:3] == (0, 0):
        nodes = list(nodes[0][1][3])
    run = _run(nodes[-1], flags) if nodes else ""
    if not run:
        return f"/{_sequence(nodes, flags)}/"
    runs.append(f"run_{len(runs)}: {run}")
    head = f"/{_sequence(nodes[:-1], flags)}/ " if nodes[1:] else ""
    return f"({head}run_{len(runs) - 1})"


def _parsed(pattern: str, flags: int) -> tuple[list[Any], int]:
    """Return a regular expression's nodes, and its flags with those that it sets itself."""
    try:
        parsed = parser.parse(pattern.replace(r"\/", "/"), flags)
    except (re.error, OverflowError) as error:
        raise ValueError(f"/{pattern}/ is no regular expression: {error}") from error
    return list(parsed), parsed.state.flags


def _run(node: tuple[Any, Any], flags: int) -> str:
    """Write the rule of a repeated set of characters with escapes in it; empty for other nodes."""
    op, value = node
    if op not in (ops.MAX_REPEAT, ops.MIN_REPEAT) or len(value[2]) != 1:
        return ""
    least, most, ((inner, member),) = value
    if inner not in (ops.ANY, ops.IN, ops.NOT_LITERAL) or most == 1:
        return ""
    plain, _, escapes = _node(inner, member, flags).partition("|\\\\")
    if not escapes:
        return ""
    plain, escapes = plain.removeprefix("(?:"), "\\\\" + escapes.removesuffix(")")
    if most is ops.MAXREPEAT and least < 2:
        return f"(/{plain}+/ | /{escapes}/){'+' if least else '*'}"
    return f"(/{plain}/ | /{escapes}/){_times(least, most)}"


def _times(least: int, most: Any) -> str:
    return f"{{{least},{'' if most is ops.MAXREPEAT else most}}}"


def _sequence(nodes: Any, flags: int) -> str:
    return "".join(_node(op, value, flags) for op, value in nodes)


def _node(op: Any, value: Any, flags: int) -> str:
    """Write one node of the tree that Python's parser makes."""
    match op:
        case ops.LITERAL if not flags & re.I and chr(value) not in _ESCAPED:
            return _shown(value)
        case ops.LITERAL:
            return _characters(_shown(value), flags)
        case ops.NOT_LITERAL:
            return _characters(f"^{_shown(value)}", flags)
        case ops.ANY:
            return _characters(r"\s\S" if flags & re.S else "^" + _shown(10), flags)
        case ops.IN:
            return _characters("".join(map(_member, value)), flags)
        case ops.BRANCH:
            return f"(?:{'|'.join(_sequence(branch, flags) for branch in value[1])})"
        case ops.SUBPATTERN:
            _, added, removed, inner = value
            return f"(?:{_sequence(inner, (flags | added) & ~removed)})"
        case ops.MAX_REPEAT | ops.MIN_REPEAT:
            least, most, inner = value
            return f"(?:{_sequence(inner, flags)}){_times(least, most)}"
    raise ValueError(f"a regular expression in it has {str(op).lower()}, which is not known here")


def _member(item: tuple[Any, Any]) -> str:
    op, value = item
    match op:
        case ops.NEGATE:
            return "^"
        case ops.LITERAL:
            return _shown(value)
        case ops.RANGE:
            return f"{_shown(value[0])}-{_shown(value[1])}"
        case ops.CATEGORY:
            return _CATEGORIES[value]
    raise ValueError(f"a set of characters in it has {str(op).lower()}, which is not known here")


def _shown(code: int) -> str:
    """Write a character as Python and Rust both read it, inside or outside a set."""
    return chr(code) if chr(code).isalnum() else f"\\U{code:08x}"


def _characters(inside: str, flags: int) -> str:
    """Write a set of characters; those that JSON escapes as their escapes."""
    known = re.compile(f"[{inside}]", flags & re.I)
    ways = [_escape(character) for character in _ESCAPED if known.match(character)]
    if not ways or not _ESCAPED_ONLY.fullmatch(inside):
        plain = f"[[{inside}]&&{_PLAIN}]"
        ways.insert(0, f"(?i:{plain})" if flags & re.I else plain)
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _escape(character: str) -> str:
    """Write the regular expression of a character's escape in JSON."""
    escape = json.dumps(character)[1:-1]
    return "".join(sign if sign.isalnum() else f"\\{sign}" for sign in escape)
