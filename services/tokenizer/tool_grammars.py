"""The grammars of answers that call a request's functions, in every format of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.chat_formats import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    TOOL_FORMATS,
    ToolMarkers,
)
from services.tokenizer.functions import Function
from services.tokenizer.jobs import TemplateFormat
from services.tokenizer.lark import (
    Fragment,
    Vocabulary,
    in_order,
    json_rule,
    literal,
    one_of,
    optional,
    repeated,
    separated,
)
from services.tokenizer.schemas import SHARED, closed, moved, prepared
from services.tokenizer.xml_grammars import ParameterGrammar

_FENCE = "```json"
_PYTHON_NAME = re.compile(r"[A-Za-z_]\w*")
# Words that Python writes unlike JSON; inside lists and objects the models write JSON's.
_PYTHON_WORDS = {"boolean": ("True", "False"), "null": ("None",)}
# The formats in which no call begins without the first marker.
_MARKED = frozenset({"deepseek", "glm", "hermes", "kimi_k2", "minimax", "mistral", "qwen3_coder"})


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How a format writes calls: the grammar of one, and what stands around each and around all.

    `call` takes the function's number, which makes the names of rules unique. `among` makes of the
    calls the grammar of a whole answer that may have them, where that is not text around them.
    """

    call: Callable[[int, Function], Fragment]
    begin: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    end: str = ""
    among: Callable[[Fragment], Fragment | None] | None = None


def call_grammar(
    functions: Sequence[Function], format: TemplateFormat, vocabulary: Vocabulary, max_calls: int
) -> Fragment:
    """Return the grammar of one to `max_calls` calls, their arguments valid by the schemas."""
    layout = _LAYOUTS[format.tool_format](vocabulary, format.template)
    bodies = one_of([layout.call(number, function) for number, function in enumerate(functions)])
    rules = dict.fromkeys((f"call: {bodies.expression}", *bodies.rules))
    body = Fragment("call", tuple(rules), bodies.grammars)
    call = in_order(layout.call_begin, body, layout.call_end)
    return in_order(layout.begin, separated(call, layout.separator, max_calls), layout.end)


def watched_calls(
    functions: Sequence[Function], format: TemplateFormat, vocabulary: Vocabulary, max_calls: int
) -> Fragment | None:
    """Return the grammar of free text with calls in it; at most one if `max_calls` is 1.

    The arguments of strict functions match their schemas, those of others are any object. None if
    the format's first marker is not a token that free text can be kept from.
    """
    loosened = [
        function if function.strict else replace(function, parameters={"type": "object"})
        for function in functions
    ]
    among = _LAYOUTS[format.tool_format](vocabulary, format.template).among
    if among is not None:
        return among(call_grammar(loosened, format, vocabulary, max_calls))
    begin = TOOL_FORMATS[format.tool_format].begin
    token_id = vocabulary.token_of(begin) if vocabulary.is_special(begin) else None
    if token_id is None or format.tool_format not in _MARKED:
        return None
    text = f"{vocabulary.any(without=token_id)}*"
    calls = in_order(call_grammar(loosened, format, vocabulary, max_calls), text)
    return in_order(text, repeated(calls, "*" if max_calls > 1 else "?"))


def _arguments(number: int, function: Function) -> Fragment:
    """Return the grammar of a function's arguments, a JSON object; `number` names its rule."""
    if function.input_lark:
        return _text_argument(number, function, '{"input": "', '"}')
    name = f"arguments_{number}"
    return Fragment(name, (json_rule(name, function.schema),))


def _text_argument(number: int, function: Function, before: str, after: str) -> Fragment:
    """Return the grammar of a text argument that has its own grammar, between two fixed texts."""
    name = f"input_{number}"
    text = Fragment(f"@{name}", grammars=((name, function.input_lark),))
    return in_order(literal(before), text, literal(after))


def _call_object(number: int, function: Function, arguments_key: str = "arguments") -> Fragment:
    """Return the grammar of `{"name": …, "arguments": {…}}`."""
    head = f'{{"name": {json.dumps(function.name)}, "{arguments_key}": '
    return in_order(literal(head), _arguments(number, function), literal("}"))


def _hermes(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`<tool_call>`, a line with name and arguments, `</tool_call>`; each call on its own."""
    markers, marker = TOOL_FORMATS["hermes"], vocabulary.marker
    return CallLayout(
        call=_call_object,
        call_begin=f"{marker(markers.begin)} {literal(chr(10))}",
        call_end=f"{literal(chr(10))} {marker(markers.end)}",
        separator=literal("\n"),
    )


def _mistral(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, a JSON array of all calls.

    From tokenizer version 11 on `[TOOL_CALLS]name[ARGS]{…}` per call.
    """
    markers, marker = TOOL_FORMATS["mistral"], vocabulary.marker
    begin, between = marker(markers.begin), marker(markers.arguments)
    if markers.arguments not in template:
        # The models write a blank after the token, or none, by the version of their tokenizer.
        begin = f'{begin} (" ")? "["'
        return CallLayout(_call_object, begin, separator=literal(", "), end='"]"')
    if markers.call_id in template:
        between = f"({marker(markers.call_id)} /[0-9A-Za-z]{{9}}/)? {between}"

    def call(number: int, function: Function) -> Fragment:
        return in_order(literal(function.name), between, _arguments(number, function))

    return CallLayout(call, call_begin=begin)


def _deepseek(vocabulary: Vocabulary, template: str) -> CallLayout:
    """All calls between two tokens, each one between two more.

    V3 and R1 write the arguments in a fence behind the name, V3.1 and later without the fence.
    """
    markers, marker = TOOL_FORMATS["deepseek"], vocabulary.marker
    fenced, between = _FENCE in template, marker(markers.arguments)

    def call(number: int, function: Function) -> Fragment:
        given = _arguments(number, function)
        if not fenced:
            return in_order(literal(function.name), between, given)
        name = literal(f"{function.name}\n{_FENCE}\n")
        return in_order(literal("function"), between, name, given, literal("\n```"))

    return CallLayout(
        call,
        begin=marker(markers.begin),
        call_begin=marker(markers.call_begin),
        call_end=marker(markers.call_end),
        separator=literal("\n") if fenced else "",
        end=marker(markers.end),
    )


def _llama_json(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`{"name": …, "parameters": {…}}`, maybe after a token, with `; ` between several.

    The whole call is one schema instead of text around the arguments' schema: where an answer may
    also be JSON of another schema, llguidance follows both only if both are schemas.
    """
    markers = TOOL_FORMATS["llama_json"]

    def call(number: int, function: Function) -> Fragment:
        if function.input_lark:
            return _call_object(number, function, markers.arguments_key)
        name = f"call_{number}"
        return Fragment(name, (json_rule(name, _call_schema(function, markers)),))

    has_token = vocabulary.token_of(markers.begin) is not None
    begin = f"({vocabulary.marker(markers.begin)})?" if has_token else ""
    return CallLayout(call, begin, separator=literal(f"{markers.separator} "))


def _call_schema(function: Function, markers: ToolMarkers) -> Any:
    inner = closed(function.parameters)
    at = f"#/properties/{markers.arguments_key}"
    shared = {key: moved(inner[key], at) for key in SHARED if key in inner}
    rest = {key: value for key, value in inner.items() if key not in SHARED}
    schema = {
        **shared,
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            markers.arguments_key: moved(rest, at),
        },
        "required": ["name", markers.arguments_key],
        "additionalProperties": False,
    }
    return prepared(schema, lenient=not function.strict)


def _llama_pythonic(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`[f(a=1), g(b="x")]`: calls as Python writes them, arguments in the order of the schema."""
    return CallLayout(_pythonic_call, literal("["), separator=literal(", "), end=literal("]"))


def _pythonic_call(number: int, function: Function) -> Fragment:
    if function.input_lark:
        return _text_argument(number, function, f'{function.name}(input="', '")')
    parameters = function.parameters
    properties, required = parameters.get("properties"), parameters.get("required")
    named = properties if isinstance(properties, dict) else {}
    wanted = set(required) if isinstance(required, list) else set()
    names = list(filter(_PYTHON_NAME.fullmatch, dict.fromkeys((*named, *sorted(wanted)))))
    shared = {key: parameters[key] for key in SHARED if key in parameters}
    rules: list[str] = []
    for at, name in enumerate(names):
        schema = named.get(name, {})
        value = _pythonic_value(f"value_{number}_{at}", schema, shared, function.strict)
        rules.append(f"argument_{number}_{at}: {literal(name + '=')} {value.expression}")
        rules += value.rules
    arguments = _pythonic_arguments(number, [name in wanted for name in names])
    call = in_order(literal(f"{function.name}("), arguments, literal(")"))
    return replace(call, rules=(*rules, *call.rules))


def _pythonic_arguments(number: int, required: Sequence[bool]) -> Fragment:
    """Write the arguments in order, any optional one left out; each `after` rule has a comma."""
    rules: list[str] = []
    alternatives: list[str] = []  # by the argument that comes first
    for at in range(len(required)):
        tail = [
            f"after_{number}_{later}" if required[later] else f"(after_{number}_{later})?"
            for later in range(at + 1, len(required))
        ]
        rules.append(f"after_{number}_{at}: {literal(', ')} argument_{number}_{at}")
        if not any(required[:at]):
            alternatives.append(" ".join((f"argument_{number}_{at}", *tail)))
    if not alternatives:
        return Fragment("")
    rules.append(f"listed_{number}: " + " | ".join(alternatives))
    listed = Fragment(f"listed_{number}", tuple(rules))
    return listed if any(required) else optional(listed)


def _pythonic_value(name: str, schema: Any, shared: dict[str, Any], strict: bool) -> Fragment:
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    plain = isinstance(schema, dict) and not {"enum", "const"} & schema.keys()
    words = [literal(word) for one in kinds for word in _PYTHON_WORDS.get(str(one), ()) if plain]
    if words and all(str(one) in _PYTHON_WORDS for one in kinds):
        return Fragment(f"({' | '.join(words)})")
    if isinstance(schema, dict):
        others = [one for one in kinds if str(one) not in _PYTHON_WORDS]
        schema = {**shared, **schema, **({"type": others} if words else {})}
    rule = json_rule(name, prepared(schema, lenient=not strict))
    return Fragment(f"({' | '.join([*words, name])})" if words else name, (rule,))


def _qwen3_coder(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`<tool_call>`, then name and parameters in tags on lines, `</tool_call>`; each on its own."""
    markers = TOOL_FORMATS["qwen3_coder"]
    return replace(
        _in_tags(markers, vocabulary),
        call_begin=f"{vocabulary.marker(markers.begin)} {literal(chr(10))}",
        call_end=f"{literal(chr(10))} {vocabulary.marker(markers.end)}",
        separator=literal("\n"),
    )


def _minimax(vocabulary: Vocabulary, template: str) -> CallLayout:
    """All calls, each with name and parameters in tags on lines, between two tokens."""
    markers = TOOL_FORMATS["minimax"]
    return replace(
        _in_tags(markers, vocabulary),
        begin=f"{vocabulary.marker(markers.begin)} {literal(chr(10))}",
        separator=literal("\n"),
        end=f"{literal(chr(10))} {vocabulary.marker(markers.end)}",
    )


def _in_tags(markers: ToolMarkers, vocabulary: Vocabulary) -> CallLayout:
    tags, spelled = markers.parameters, vocabulary.spelled
    assert tags is not None
    parameters = ParameterGrammar(tags, vocabulary)

    def call(number: int, function: Function) -> Fragment:
        head = spelled(f"{markers.call_begin}{function.name}{tags.name_end}\n")
        return in_order(head, parameters.write(number, function), spelled(markers.call_end))

    return CallLayout(call)


def _glm(vocabulary: Vocabulary, template: str) -> CallLayout:
    """`<tool_call>name`, keys and values in tags, `</tool_call>`; on lines up to GLM 4.6."""
    markers, marker = TOOL_FORMATS["glm"], vocabulary.marker
    tags = markers.parameters
    assert tags is not None
    line = "" if f"{tags.key_end}{tags.value_begin}" in template else "\n"
    parameters = ParameterGrammar(tags, vocabulary, line)

    def call(number: int, function: Function) -> Fragment:
        return in_order(literal(function.name + line), parameters.write(number, function))

    return CallLayout(
        call,
        call_begin=marker(markers.begin),
        call_end=marker(markers.end),
        separator=literal(line) if line else "",
    )


def _kimi_k2(vocabulary: Vocabulary, template: str) -> CallLayout:
    """All calls between two tokens, each one, with its id, between two more."""
    markers, marker = TOOL_FORMATS["kimi_k2"], vocabulary.marker

    def call(number: int, function: Function) -> Fragment:
        name, between = literal(f"functions.{function.name}:"), marker(markers.arguments)
        return in_order(name, "/[0-9]{1,4}/", between, _arguments(number, function))

    return CallLayout(
        call,
        begin=marker(markers.begin),
        call_begin=marker(markers.call_begin),
        call_end=marker(markers.call_end),
        end=marker(markers.end),
    )


def _harmony(vocabulary: Vocabulary, template: str) -> CallLayout:
    """A message with a recipient, before or behind its channel; the token behind ends the answer.

    Among other messages it comes last. Text that the prompt has begun may stand before them all.
    """
    spelled = vocabulary.spelled
    kinds = f'(" " {spelled(CONSTRAIN)} "json" | " json")?'

    def call(number: int, function: Function) -> Fragment:
        to = f" to=functions.{function.name}"
        ways = f"({spelled(f'{CHANNEL}commentary{to}')} | {spelled(f'{to}{CHANNEL}commentary')})"
        return in_order(ways, kinds, spelled(MESSAGE), _arguments(number, function))

    def among(calls: Fragment) -> Fragment | None:
        if not all(map(vocabulary.is_special, TOOL_FORMATS["harmony"].others)):
            return None
        text = f"{vocabulary.ordinary()}*"
        channel = '("analysis" | "commentary" | "final")'
        begin = f"({spelled(END + START + 'assistant')})?"
        message = f"{begin} {spelled(CHANNEL)} {channel} {spelled(MESSAGE)} {text}"
        return in_order(f"{text} ({message})*", optional(in_order(begin, calls)))

    return CallLayout(call, separator=spelled(f"{CALL}{START}assistant"), among=among)


_LAYOUTS: Final[Mapping[str, Callable[[Vocabulary, str], CallLayout]]] = {
    "hermes": _hermes,
    "llama_json": _llama_json,
    "llama_pythonic": _llama_pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "minimax": _minimax,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
}
