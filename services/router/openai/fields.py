"""What this server does with fields that are not in its request models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from common.messages.failure import Failure
from services.router.errors import ApiError, shown, unsupported
from services.router.request_warnings import Warnings


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that cannot be served unless its value asks for nothing; `why` may say what to do."""

    harmless: tuple[Any, ...] = ()
    why: str = ""

    def is_asked_by(self, value: Any) -> bool:
        """Whether a value asks for something."""
        known = any(value == each and type(value) is type(each) for each in self.harmless)
        return value is not None and not known


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

# Known, and answered without what they ask for: the client is told, as peers do not.
WITHOUT_EFFECT: Mapping[str, Refused] = {
    "verbosity": Refused(("medium",), "say it in a message"),
    "moderation": Refused(({},), "no content is checked here"),
    "web_search_options": Refused(why="let the model call a tool of yours"),
    "vllm_xargs": Refused(({},), "there are no extensions here"),
}

# What peers have removed, and some of them silently ignore: what to use instead.
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

# Fields whose silent loss would change the answer.
UNSUPPORTED_FIELDS: Mapping[str, Refused] = {
    "suffix": Refused(("",), "write the prompt as the model's own fill-in-the-middle format"),
    "audio": Refused(why=_TEXT_ONLY),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "media_io_kwargs": Refused(({},), _TEXT_ONLY),
    "mm_processor_kwargs": Refused(({},), _TEXT_ONLY),
    "image_data": Refused(why=_TEXT_ONLY),
    "audio_data": Refused(why=_TEXT_ONLY),
    "video_data": Refused(why=_TEXT_ONLY),
    "prompt_embeds": Refused(why="send the prompt as text or token ids"),
    "input_embeds": Refused(why="send the prompt as text or token ids"),
    "input_ids": Refused(why="send token ids as prompt of /v1/completions"),
    "chat_template": Refused(why="the template is the model's own"),
    "chat_template_content_format": Refused(("auto",)),
    "use_beam_search": Refused((False,)),
    "length_penalty": Refused((1, 1.0)),
    "watermarking": Refused((False,)),
    "repetition_detection": Refused(why="use repetition_penalty"),
    "logprob_token_ids": Refused(([],), "use logprobs with a number of candidates"),
    "stop_regex": Refused(([],), "use stop"),
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "logits_processors": Refused(([],)),
    "custom_logit_processor": Refused(),
    "custom_params": Refused(({},)),
    "extra_key": Refused(("",), "use cache_salt"),
    "lora_path": Refused(why="name a model of /v1/models as model"),
    "session_params": Refused(({},)),
    "kv_transfer_params": Refused(({},), _ONE_PROCESS),
    "ec_transfer_params": Refused(({},), _ONE_PROCESS),
    "bootstrap_host": Refused(why=_ONE_PROCESS),
    "bootstrap_room": Refused(why=_ONE_PROCESS),
    "return_hidden_states": Refused((False,)),
    "return_routed_experts": Refused((False,)),
    "routed_experts_prompt_start": Refused((0,)),
    "return_prompt_text": Refused((False,), "use return_token_ids and /detokenize"),
    "return_token_offsets": Refused((False,)),
}


def refuse_unsupported(body: Mapping[str, Any], more: Mapping[str, Refused] | None = None) -> None:
    """Raise ApiError 400 for a field that asks for something this server cannot do.

    `more` has those that only one endpoint cannot.
    """
    for field, value in body.items():
        if value is None:
            continue
        if field in REMOVED_FIELDS:
            message = f"{field}: is not a field any more; use {REMOVED_FIELDS[field]}"
            raise ApiError(Failure(400, "unsupported_parameter", message, field))
        refused = UNSUPPORTED_FIELDS.get(field) or (more or {}).get(field)
        if refused is None:
            continue
        if refused.is_asked_by(value):
            raise unsupported(field, refused.why)


def check_unknown(body: Mapping[str, Any], known: Collection[str], warnings: Warnings) -> None:
    """Warn about the fields that nobody here reads; ApiError 400 where the server is strict."""
    for name, value in body.items():
        hint = WITHOUT_EFFECT.get(name)
        if hint is not None:
            if hint.is_asked_by(value):
                warnings.add(name, f"has no effect; {hint.why}")
            continue
        if name in known or name in IGNORED_FIELDS or name in REMOVED_FIELDS:
            continue
        if name in UNSUPPORTED_FIELDS:
            continue
        name = name[:64]
        if warnings.refuse_unknown:
            message = f"{name}: is not a field of this request"
            raise ApiError(Failure(400, "unknown_parameter", message, name))
        warnings.add(name, f"unknown request field {shown(name)} is ignored")
