"""`prediction` of a chat request: a text that the answer is expected to repeat for the most part.

It makes the answer come faster, and never another one: so it goes together with every other field,
also with those that OpenAI refuses beside it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.router.errors import unsupported
from services.router.json_schema import STRING, array, constant, either, nullable, partial
from services.router.request_fields import check_type, choice_in, object_at, objects_at, string_in

_FIELD = "prediction"


def read_prediction(prediction: Any) -> str | None:
    """Return the text that is expected; ApiError 400."""
    if prediction is None:
        return None
    choice_in(object_at(prediction, _FIELD), "type", ("content",), _FIELD)
    content, where = prediction.get("content"), f"{_FIELD}.content"
    expected = "a string or an array of text parts"
    if not isinstance(content, list):
        check_type(content, str, where, expected)
        return str(content)
    texts = []
    for part, place in objects_at(content, where, expected):
        if part.get("type") != "text":
            raise unsupported(f"{place}.type", "only text is")
        texts.append(string_in(part, "text", place))
    return "".join(texts)


_PART = partial(type=constant("text"), text=STRING)
_PREDICTION = partial(type=constant("content"), content=either(STRING, array(_PART)))

Prediction = Annotated[
    str | None, PlainValidator(read_prediction), WithJsonSchema(nullable(_PREDICTION))
]
