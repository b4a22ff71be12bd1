"""The request fields that chat and completions share, from JSON to the ring's settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from common.messages.sampling import SamplingParams
from common.messages.tokenize import StreamSettings
from services.router.errors import bad_field, shown, unsupported
from services.router.generate_request import GenerateRequest
from services.router.json_schema import NOT_EMPTY, NUMBER, array, either, nullable
from services.router.middleware import is_harmless_id
from services.router.openai.chunks import AnswerOptions
from services.router.prompts import MAX_INT32, TOKEN_ID, check_ids
from services.router.request_fields import check_type
from services.router.request_model import OpenAIModel
from services.router.request_warnings import Warnings

MAX_CHOICES = 128
MAX_STOPS = 128  # OpenAI's own limit is 4
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 16 << 10  # of all stops: every choice has tables of that size
MAX_STOP_TOKEN_IDS = 512
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_TOP_LOGPROBS = 20
ALL_LOGPROBS = -1  # the whole vocabulary in vLLM; here as many as allowed
MAX_TEMPERATURE = 1e6  # OpenAI's own limit is 2; here every token is as likely as any other
SEED_MASK = (1 << 63) - 1
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

WHICH_MODEL = "one of `/v1/models`; may be left out if only one is served"
ModelName = Annotated[str | None, Field(max_length=512, description=WHICH_MODEL)]
Priority = Annotated[
    int | None,
    Field(
        ge=-MAX_INT32,
        le=MAX_INT32,
        description="requests with a lower number go first; negative ones need `min_priority` of "
        "the key or the server",
    ),
]
Timeout = Annotated[
    float | None,
    Field(
        gt=0,
        description="seconds after which the request "
        "[ends with a 408](errors.md#how-long-a-request-may-take), or its stream with that error",
    ),
]
NumLogprobs = Annotated[int | None, Field(ge=ALL_LOGPROBS, le=MAX_TOP_LOGPROBS)]
TopLogprobs = Annotated[
    NumLogprobs,
    Field(
        description="how many of the most likely tokens `logprobs` has at each place, up to "
        f"{MAX_TOP_LOGPROBS}; -1 means {MAX_TOP_LOGPROBS}"
    ),
]
CacheSalt = Annotated[
    str | None,
    Field(max_length=256, description="share cached prefixes only with requests of the same salt"),
]
TRUNCATION = WithJsonSchema(nullable(either({"const": -1}, {**TOKEN_ID, "minimum": 1})))
_STOP = {**NOT_EMPTY, "maxLength": MAX_STOP_CHARACTERS}
_BAD_WORD = {**NOT_EMPTY, "maxLength": MAX_BAD_WORD_CHARACTERS}


def read_stops(value: Any) -> tuple[str, ...]:
    """Read `stop`: a string or several."""
    if value is None:
        return ()
    if isinstance(value, str):
        _check_text(value, "stop", MAX_STOP_CHARACTERS)
        return (value,)
    kind = "a string or an array of strings"
    stops = _texts(value, "stop", kind, MAX_STOPS, MAX_STOP_CHARACTERS)
    check_all_stops(stops, "stop")
    return stops


def check_all_stops(stops: Sequence[str], field: str) -> None:
    """Bound the stops of a request together; ApiError 400."""
    total = sum(map(len, stops))
    if total > MAX_ALL_STOP_CHARACTERS:
        most = f"may have {MAX_ALL_STOP_CHARACTERS} characters at most"
        raise bad_field(field, f"{most}, all together (it has {total})")


def read_bad_words(value: Any) -> tuple[str, ...]:
    """Read `bad_words`, none of which an answer may contain."""
    if value is None:
        return ()
    kind = "an array of strings"
    return _texts(value, "bad_words", kind, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)


def _check_ids(field: str, ids: list[int] | None) -> list[int] | None:
    """Check token ids, but for the vocabulary, which is known at admission."""
    check_ids(ids or [], field)
    return ids


def _check_bias(bias: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check `logit_bias`: token ids, as JSON has them for keys, and numbers."""
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 9:
            message = f"has the key {shown(key)}, which is not a token id"
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            message = f"of token {key} should be a number (it is {shown(value)})"
        elif not -100 <= value <= 100:
            message = f"of token {key} should be within -100 and 100 (it is {shown(value)})"
        else:
            continue
        raise bad_field("logit_bias", message)
    return bias


def _texts(value: Any, field: str, kind: str, most: int, characters: int) -> tuple[str, ...]:
    check_type(value, list, field, kind)
    if len(value) > most:
        raise bad_field(field, f"may have at most {most} strings (it has {len(value)})")
    for index, text in enumerate(value):
        check_type(text, str, f"{field}[{index}]", "a string")
        _check_text(text, f"{field}[{index}]", characters)
    return tuple(dict.fromkeys(value))


def _check_text(text: str, field: str, characters: int) -> None:
    if not text or len(text) > characters:
        raise bad_field(field, f"should have 1 to {characters} characters (it has {len(text)})")


def _check_truncation(length: int | None) -> int | None:
    if length == 0:
        raise bad_field("truncate_prompt_tokens", "should be at least 1, or -1 (it is 0)")
    return length


def _check_spaces(between: bool | None) -> bool | None:
    if between is False:
        raise unsupported("spaces_between_special_tokens", "only true, the default, is")
    return between


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


NO_STREAM_OPTIONS = StreamOptions()


class SamplingFields(OpenAIModel):
    """Fields of several APIs about sampling and the text of the answer."""

    model: ModelName = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    """the most tokens to generate, by default as many as fit; a larger number is lowered to that,
    with a [warning](errors.md#warnings)"""
    n: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description=f"answers to each prompt, up to {MAX_CHOICES}"
    )
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """the same number as `n`"""
    stream: bool | None = None
    """[events](chat.md#streaming) instead of one body"""
    stream_options: StreamOptions | None = None
    """with `stream`: `include_usage` for a last chunk with the usage, `continuous_usage_stats` for
    the usage so far on every chunk"""
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    """how random the choice of tokens is, from 0 to a million; by default the model's own"""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """sample among the likeliest tokens of this total probability; by default the model's own"""
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    """sample among this many of the likeliest, 0 or -1 for all; by default the model's own"""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    """drop tokens below this share of the top token's probability; by default the model's own"""
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """subtracted from the logits of the tokens that the answer already has"""
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """subtracted from the logit of a token once for each time that the answer has it"""
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0)
    """above 1 makes tokens of prompt and answer less likely; by default the model's own"""
    logit_bias: Annotated[
        dict[str, Any] | None,
        Field(max_length=MAX_LOGIT_BIAS),
        AfterValidator(_check_bias),
        WithJsonSchema(
            nullable(
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {**NUMBER, "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_LOGIT_BIAS,
                }
            )
        ),
    ] = None
    """added to the logits of tokens, by their ids"""
    seed: int | None = Field(None, ge=-(1 << 63), le=SEED_MASK)
    """the same seed gives the same random numbers"""
    stop: Annotated[
        tuple[str, ...],
        PlainValidator(read_stops),
        WithJsonSchema(nullable(either(_STOP, array(_STOP, maxItems=MAX_STOPS)))),
    ] = Field(
        (),
        description=f"where the answer ends: one string or up to {MAX_STOPS}, of "
        f"{MAX_ALL_STOP_CHARACTERS:,} characters together",
    )
    include_stop_str_in_output: bool | None = None
    """whether the answer keeps the `stop` that ended it; by default it does not"""
    stop_token_ids: Annotated[
        list[int] | None,
        Field(max_length=MAX_STOP_TOKEN_IDS),
        AfterValidator(partial(_check_ids, "stop_token_ids")),
        WithJsonSchema(nullable(array(TOKEN_ID, maxItems=MAX_STOP_TOKEN_IDS))),
    ] = Field(None, description=f"up to {MAX_STOP_TOKEN_IDS} tokens that end the answer")
    ignore_eos: bool | None = None
    """whether the answer goes on after the model's own end of a text"""
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    """the least tokens to generate before anything but a complete structure may end the answer"""
    allowed_token_ids: Annotated[
        list[int] | None,
        Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS),
        AfterValidator(partial(_check_ids, "allowed_token_ids")),
        WithJsonSchema(nullable(array(TOKEN_ID, minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS))),
    ] = None
    """the only tokens that may be sampled, besides those that end the answer"""
    bad_words: Annotated[
        tuple[str, ...],
        PlainValidator(read_bad_words),
        WithJsonSchema(nullable(array(_BAD_WORD, maxItems=MAX_BAD_WORDS))),
    ] = ()
    """words that must not appear, as the tokenizer splits them, with and without a leading space"""
    prompt_logprobs: NumLogprobs = Field(
        None,
        description="log probabilities of the prompt's tokens and of this many of the most likely, "
        f"up to {MAX_TOP_LOGPROBS}, not while streaming; -1 means {MAX_TOP_LOGPROBS}",
    )
    return_token_ids: bool | None = None
    """whether to show the token ids of the prompt and the answer"""
    return_tokens_as_token_ids: bool | None = None
    """whether log probabilities name tokens as `token_id:5` instead of their texts"""
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, le=MAX_INT32),
        AfterValidator(_check_truncation),
        TRUNCATION,
    ] = None
    """cut a longer prompt to this many tokens; -1 means as many as leave room for the answer"""
    truncation_side: Literal["left", "right"] | None = None
    """the side on which `truncate_prompt_tokens` cuts the prompt, by default `left`"""
    skip_special_tokens: bool | None = None
    """whether special tokens are left out of the answer's text, as they are by default"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its special tokens to a text, as it does by default"""
    spaces_between_special_tokens: Annotated[
        bool | None,
        AfterValidator(_check_spaces),
        WithJsonSchema({"enum": [True, None]}),
    ] = None
    """only true, the default"""
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    request_id: str | None = None
    """1 to 128 letters, digits or `._:-`; returned as `X-Request-Id`, unless the request has that
    header, and at the end of the answer's `id`"""
    rid: str | None = None
    """another name for `request_id`, which comes first"""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "only n itself is; ask for n and choose among the answers")
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "is only allowed together with stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_field("prompt_logprobs", "is not available together with stream: true")
        return self

    @property
    def unset(self) -> frozenset[str]:
        """Settings that the client leaves to the model's own defaults."""
        return frozenset(name for name in MODEL_DEFAULTS if getattr(self, name) is None)

    @property
    def given_id(self) -> str:
        """The id that the client gave its request in the body, where one can be shown again."""
        given = self.request_id or self.rid or ""
        return given if is_harmless_id(given) else ""

    @property
    def allowed_ids(self) -> tuple[int, ...]:
        """The only tokens allowed, if there are any."""
        return tuple(dict.fromkeys(self.allowed_token_ids or ()))

    def warn(self, warnings: Warnings) -> None:
        """Warn about fields that cannot be honoured as they are."""
        if (self.request_id or self.rid) and not self.given_id:
            name = "request_id" if self.request_id else "rid"
            warnings.add(name, "is left out; it may have 1 to 128 letters, digits, ., _, : or -")
        warn_of_all("prompt_logprobs", self.prompt_logprobs, warnings)

    def options(self) -> AnswerOptions:
        """Return what is to be shown beside the text."""
        stream = self.stream_options or NO_STREAM_OPTIONS
        return AnswerOptions(
            include_usage=bool(stream.include_usage),
            continuous_usage=bool(stream.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs is not None,
        )

    def generate_request(self, **own: Any) -> GenerateRequest:
        """Return what to generate, with the fields that each API sets on its `own`."""
        shared: dict[str, Any] = {
            "model": self.model or "",
            "has_seed": self.seed is not None,
            "num_choices": self.n or 1,
            "priority": self.priority or 0,
            "timeout_s": self.timeout or 0.0,
            "cache_salt": self.cache_salt or "",
            "unset": self.unset,
            "truncate_to": self.truncate_prompt_tokens or 0,
            "truncate_side": self.truncation_side or "left",
        }
        return GenerateRequest(**{**shared, **own})

    def stream_settings(self) -> StreamSettings:
        skip = self.skip_special_tokens
        return StreamSettings(
            stop=self.stop,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=True if skip is None else skip,
            return_prompt_ids=bool(self.return_token_ids),
        )

    def sampling(self, max_tokens: int, num_logprobs: int) -> SamplingParams:
        """Return the sampling settings; `seed` is 0 if the client gave none.

        `max_tokens` 0 means as much as fits.
        """
        min_tokens = self.min_tokens or 0
        bias = {int(key): float(value) for key, value in (self.logit_bias or {}).items()}
        if max_tokens and min_tokens > max_tokens:
            raise bad_field("min_tokens", f"must not exceed max_tokens, which is {max_tokens}")
        return SamplingParams(
            max_tokens=max_tokens,
            seed=0 if self.seed is None else self.seed & SEED_MASK,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),  # -1 is another name for "off"
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=tuple(sorted(bias.items())),
            min_tokens=min_tokens,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_candidates(self.prompt_logprobs),
        )


def num_candidates(wanted: int | None) -> int:
    """Return how many candidates a token has in its logprobs; -1 where there are none at all."""
    if wanted is None:
        return -1
    return MAX_TOP_LOGPROBS if wanted == ALL_LOGPROBS else wanted


def warn_of_all(field: str, wanted: int | None, warnings: Warnings) -> None:
    """Warn that logprobs of the whole vocabulary are not available."""
    if wanted == ALL_LOGPROBS:
        warnings.add(field, f"{ALL_LOGPROBS} is {MAX_TOP_LOGPROBS} here, which is the most")
