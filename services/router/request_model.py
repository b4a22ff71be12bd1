"""Request models: pydantic reads a body in one walk; its errors become one 400."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from common.messages.failure import Failure
from services.router.errors import (
    MAX_INPUT_CHARACTERS,
    ApiError,
    FieldError,
    bad_field,
    shown,
    unsupported,
)
from services.router.request_warnings import MAX_NAME_CHARACTERS, Warnings

MAX_LISTED_ERRORS = 3
IGNORED = "accepted, without effect"  # the description of such a field
WARNED = f"{IGNORED} and with a warning"

_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")
_LENGTH = re.compile(r"^(?:List|Dictionary|String) should have")


@dataclass(frozen=True, slots=True)
class RefusedFields:
    """A field that is refused unless its value is harmless; `why` may suggest an alternative.

    `use` names the field that replaces one that peers have removed.
    """

    harmless: tuple[Any, ...] = ()
    why: str = ""
    use: str = ""

    def allows(self, value: Any) -> bool:
        """Whether a value is harmless: null, or one that changes nothing."""
        return value is None or any(
            value == each and type(value) is type(each) for each in self.harmless
        )

    def check(self, field: str, value: Any) -> None:
        """Raise ApiError 400 for a value that is not harmless."""
        if self.allows(value):
            return
        if self.use:
            message = f"is not a field any more; use {self.use}"
            raise bad_field(field, message, "unsupported_parameter")
        raise unsupported(field, self.why)

    @property
    def json_schema(self) -> dict[str, Any]:
        """The harmless values; JSON writes some of them in two ways, as 1 and 1.0."""
        values = [None, *self.harmless]
        return {"enum": [value for at, value in enumerate(values) if value not in values[:at]]}


# Known, without effect here, and harmless to leave out: no warning.
IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "session_id",
        "stream_interval",
        "log_metrics",
        "return_mm_kwargs",
        "return_cached_tokens_details",
        "prediction",  # makes OpenAI's answers faster, not other ones
    }
)

# Known and ignored, with a warning, which peers do not give.
WITHOUT_EFFECT: Mapping[str, RefusedFields] = {
    "verbosity": RefusedFields(("medium",), "say it in a message"),
    "moderation": RefusedFields(({},), "no content is checked here"),
    "web_search_options": RefusedFields(why="let the model call a tool of yours"),
    "vllm_xargs": RefusedFields(({},), "there are no extensions here"),
}

# Fields that peers have removed, some of them silently, and what replaces them.
REMOVED_FIELDS: Mapping[str, str] = {
    "guided_json": 'structured_outputs {"json": …} or response_format',
    "guided_regex": 'structured_outputs {"regex": …}',
    "guided_choice": 'structured_outputs {"choice": …}',
    "guided_grammar": 'structured_outputs {"grammar": …}',
    "guided_decoding_backend": "structured_outputs, which has one backend here",
    "guided_whitespace_pattern": "structured_outputs without it",
    "structural_tag": 'response_format {"type": "structural_tag"}',
}

_TEXT_ONLY = "this server takes and makes text only"
_ONE_PROCESS = "prompts and their cache stay where they are"


def _same(names: Iterable[str], *harmless: Any, why: str = "") -> dict[str, RefusedFields]:
    return dict.fromkeys(names, RefusedFields(harmless, why))


# Fields whose silent loss would change the answer.
UNSUPPORTED_FIELDS: Mapping[str, RefusedFields] = {
    **{name: RefusedFields(use=use) for name, use in REMOVED_FIELDS.items()},
    "suffix": RefusedFields(("",), "write the prompt as the model's own fill-in-the-middle format"),
    **_same(("audio", "image_data", "audio_data", "video_data"), why=_TEXT_ONLY),
    **_same(("media_io_kwargs", "mm_processor_kwargs"), {}, why=_TEXT_ONLY),
    "modalities": RefusedFields((["text"],), _TEXT_ONLY),
    **_same(("prompt_embeds", "input_embeds"), why="send the prompt as text or token ids"),
    "input_ids": RefusedFields(why="send token ids as prompt of /v1/completions"),
    "chat_template": RefusedFields(why="the template is the model's own"),
    "chat_template_content_format": RefusedFields(("auto",)),
    **_same(("use_beam_search", "watermarking"), False),
    **_same(("return_hidden_states", "return_routed_experts", "return_token_offsets"), False),
    "length_penalty": RefusedFields((1, 1.0)),
    "repetition_detection": RefusedFields(why="use repetition_penalty"),
    "logprob_token_ids": RefusedFields(([],), "use logprobs with a number of candidates"),
    "stop_regex": RefusedFields(([],), "use stop"),
    "no_stop_trim": RefusedFields((False,), "use include_stop_str_in_output"),
    "logits_processors": RefusedFields(([],)),
    "custom_logit_processor": RefusedFields(),
    "custom_params": RefusedFields(({},)),
    "extra_key": RefusedFields(("",), "use cache_salt"),
    "lora_path": RefusedFields(why="name a model of /v1/models as model"),
    "session_params": RefusedFields(({},)),
    **_same(("kv_transfer_params", "ec_transfer_params"), {}, why=_ONE_PROCESS),
    **_same(("bootstrap_host", "bootstrap_room"), why=_ONE_PROCESS),
    "routed_experts_prompt_start": RefusedFields((0,)),
    "return_prompt_text": RefusedFields((False,), "use return_token_ids and /detokenize"),
}


class RequestModel(BaseModel):
    """The body of a request; a field that is null counts as not given, as with OpenAI.

    Rules stand beside the fields, as validators that raise `bad_field`. The string below a field,
    or its `description`, is its row in docs/api and its description in the OpenAPI document.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )

    refused: ClassVar[Mapping[str, RefusedFields]] = {}

    @classmethod
    def read(cls, body: Mapping[str, Any], warnings: Warnings | None = None) -> Self:
        """Validate a body; ApiError 400 names the field at fault.

        `warnings` get the unknown fields; a strict server refuses them.
        """
        try:
            fields = cls.model_validate(body)
        except ValidationError as error:
            raise from_validation(error) from None
        cls.check_others(body, warnings)
        return fields

    @classmethod
    def check_others(cls, body: Mapping[str, Any], warnings: Warnings | None = None) -> None:
        """Refuse or warn about fields that the model does not have, as `read` does."""
        known = cls.__pydantic_fields__
        unknown = []
        for name, value in body.items():
            if name in known or name in IGNORED_FIELDS:
                continue
            if (refused := cls.refused.get(name)) is not None:
                refused.check(name, value)
            elif (hint := WITHOUT_EFFECT.get(name)) is not None:
                if warnings is not None and not hint.allows(value):
                    warnings.add(name, f"has no effect; {hint.why}")
            elif name not in UNSUPPORTED_FIELDS:
                unknown.append(name)
        if unknown and warnings is not None:
            warn_unknown(unknown, warnings)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        refused = {name: each.json_schema for name, each in cls.refused.items()}
        schema["properties"].update(refused)
        for field in schema["properties"].values():
            if "description" in field:  # its links lead to pages of docs/api
                field["description"] = _LINK.sub(r"\1", " ".join(field["description"].split()))
        return schema


class OpenAIModel(RequestModel):
    """The body of a request in OpenAI's style, in which unsupported fields are errors."""

    refused: ClassVar[Mapping[str, RefusedFields]] = UNSUPPORTED_FIELDS


def warn_unknown(names: Sequence[str], warnings: Warnings) -> None:
    """Warn about unknown fields; ApiError 400 where the server is strict."""
    if warnings.refuse_unknown:
        message = "is not a field of this request"
        raise bad_field(names[0][:MAX_NAME_CHARACTERS], message, "unknown_parameter")
    warnings.add_unknown(names)


def from_validation(error: ValidationError) -> ApiError:
    """Turn pydantic's errors into one 400 that names the first field and lists a few."""
    problems = error.errors(include_url=False)
    failures = [_failure(problem) for problem in problems[:MAX_LISTED_ERRORS]]
    lines = [failure.message for failure in failures]
    if len(problems) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(problems) - MAX_LISTED_ERRORS} more")
    return ApiError(replace(failures[0], message="; ".join(lines)))


def _failure(problem: ErrorDetails) -> Failure:
    """Return the failure that a validator of ours raised, or pydantic's error in our words."""
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, FieldError):
        return raised.failure
    field = _path(problem["loc"])
    if problem["type"] == "missing":
        return Failure(400, "missing_required_parameter", f"{field}: is required", field)
    message = f"{field}: {_worded(problem['msg'])} (it is {shown(problem['input'])})"
    return Failure(400, "invalid_value", message, field)


def _worded(message: str) -> str:
    """Rewrite an error of pydantic's in the words of the other refusals."""
    message = _LENGTH.sub("should have", message).partition(" after validation")[0]
    message = message.partition(" or instance of ")[0].replace("a valid dictionary", "an object")
    return message.removeprefix("Value error, ").replace("Input should", "should")


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[: 2 * MAX_INPUT_CHARACTERS]
