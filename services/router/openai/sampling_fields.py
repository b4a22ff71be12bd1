"""The request fields that chat and completions share, from JSON to the ring's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.sampling import SamplingParams
from common.messages.tokenize import StreamSettings
from services.router.errors import ApiError, bad_field, from_validation, shown, unsupported
from services.router.middleware import is_harmless_id
from services.router.openai.options import AnswerOptions
from services.router.request_warnings import Warnings

MAX_CHOICES = 128
MAX_STOPS = 128  # OpenAI's own limit is 4
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 16 << 10  # of all stops: every choice has tables as long
MAX_STOP_TOKEN_IDS = 512
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_TOP_LOGPROBS = 20
ALL_LOGPROBS = -1  # vLLM's "of the whole vocabulary": here as many as may be
MAX_TEMPERATURE = 1e6  # OpenAI's own limit is 2; here every token is as likely as any other
MAX_INT32 = (1 << 31) - 1
SEED_MASK = (1 << 63) - 1
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(BaseModel):
    """Fields of both endpoints that say how to sample and what to do with the text.

    A field that is null counts as not given, as with OpenAI.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    temperature: float | None = Field(None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT32)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0)
    seed: int | None = Field(None, ge=-(1 << 63), le=SEED_MASK)
    logit_bias: dict[str, Any] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: list[int] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS
    )
    bad_words: Any = None
    stop: Any = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT32)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=ALL_LOGPROBS, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-MAX_INT32, le=MAX_INT32)
    cache_salt: str | None = Field(None, max_length=256)
    request_id: str | None = None
    rid: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

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
        return _read_ids(self.allowed_token_ids, "allowed_token_ids")

    @property
    def banned_words(self) -> tuple[str, ...]:
        """What no answer may contain."""
        return _read_bad_words(self.bad_words)

    def warn(self, warnings: Warnings) -> None:
        """Say what of these fields is not as it was asked for."""
        if (self.request_id or self.rid) and not self.given_id:
            name = "request_id" if self.request_id else "rid"
            warnings.add(name, "is left out; it may have 1 to 128 letters, digits, ., _, : or -")
        warn_of_all("prompt_logprobs", self.prompt_logprobs, warnings)

    def options(self) -> AnswerOptions:
        """Return what is to be shown beside the text."""
        stream = self.stream_options
        return AnswerOptions(
            include_usage=self.include_usage,
            continuous_usage=stream is not None and bool(stream.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.prompt_logprobs is not None,
            given_id=self.given_id,
        )

    def stream_settings(self) -> StreamSettings:
        """Return the detokenizer's settings."""
        skip = self.skip_special_tokens
        return StreamSettings(
            stop=_read_stops(self.stop),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=True if skip is None else skip,
            return_prompt_ids=bool(self.return_token_ids),
        )

    def sampling(self, max_tokens: int, num_logprobs: int) -> SamplingParams:
        """Return the sampling settings; `seed` is 0 where the client gave none.

        `max_tokens` 0 means as much as fits.
        """
        min_tokens = self.min_tokens or 0
        if max_tokens and min_tokens > max_tokens:
            raise bad_field("min_tokens", f"must not exceed max_tokens, which is {max_tokens}")
        return SamplingParams(
            max_tokens=max_tokens,
            seed=0 if self.seed is None else self.seed & SEED_MASK,
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),  # -1 is another name for "off"
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=_read_logit_bias(self.logit_bias),
            min_tokens=min_tokens,
            stop_token_ids=_read_ids(self.stop_token_ids, "stop_token_ids"),
            ignore_eos=bool(self.ignore_eos),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_candidates(self.prompt_logprobs),
        )


def parse_sampling(body: dict[str, Any], may_be_empty: bool = False) -> SamplingFields:
    """Validate the shared fields of a request; ApiError 400 names the field at fault.

    Only a request that `may_be_empty` may ask for no tokens at all.
    """
    try:
        fields = SamplingFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    if fields.max_tokens == 0 and not may_be_empty:
        raise bad_field("max_tokens", "should be greater than or equal to 1 (it is 0)")
    if fields.best_of not in (None, fields.n or 1):
        raise unsupported("best_of", "only n itself is; ask for n and choose among the answers")
    if fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "only true, the default, is")
    if fields.truncate_prompt_tokens == 0:
        raise bad_field("truncate_prompt_tokens", "should be at least 1, or -1 (it is 0)")
    _check_stream(fields)
    return fields


def num_candidates(wanted: int | None) -> int:
    """Return how many candidates a token has in its logprobs; -1 where there are none at all."""
    if wanted is None:
        return -1
    return MAX_TOP_LOGPROBS if wanted == ALL_LOGPROBS else wanted


def warn_of_all(field: str, wanted: int | None, warnings: Warnings) -> None:
    """Say that logprobs of the whole vocabulary are not to be had."""
    if wanted == ALL_LOGPROBS:
        warnings.add(field, f"{ALL_LOGPROBS} is {MAX_TOP_LOGPROBS} here, which is the most")


def _check_stream(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_field("stream_options", "is only allowed together with stream: true")
    if fields.stream and fields.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "is not available together with stream: true")


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _read_stops(value: Any) -> tuple[str, ...]:
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


def _read_bad_words(value: Any) -> tuple[str, ...]:
    """Read `bad_words`, none of which an answer may contain."""
    if value is None:
        return ()
    kind = "an array of strings"
    return _texts(value, "bad_words", kind, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)


def _read_ids(ids: list[int] | None, field: str) -> tuple[int, ...]:
    """Read a list of token ids; which of them the model has is checked at admission."""
    for index, token_id in enumerate(ids or ()):
        if not 0 <= token_id <= MAX_INT32:
            raise bad_field(f"{field}[{index}]", f"is not a token id (it is {shown(token_id)})")
    return tuple(dict.fromkeys(ids or ()))


def _read_logit_bias(bias: dict[str, Any] | None) -> tuple[tuple[int, float], ...]:
    """Read `logit_bias`: token ids, as JSON has them for keys, and numbers."""
    pairs: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 9:
            raise _bias_error(f"has the key {shown(key)}, which is not a token id")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _bias_error(f"of token {key} should be a number (it is {shown(value)})")
        if not -100 <= value <= 100:
            raise _bias_error(
                f"of token {key} should be within -100 and 100 (it is {shown(value)})"
            )
        pairs[int(key)] = float(value)
    return tuple(sorted(pairs.items()))


def _texts(value: Any, field: str, kind: str, most: int, characters: int) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise bad_field(field, f"should be {kind} (it is {shown(value)})")
    if len(value) > most:
        raise bad_field(field, f"may have at most {most} strings (it has {len(value)})")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise bad_field(f"{field}[{index}]", f"should be a string (it is {shown(text)})")
        _check_text(text, f"{field}[{index}]", characters)
    return tuple(dict.fromkeys(value))


def _check_text(text: str, field: str, characters: int) -> None:
    if not text or len(text) > characters:
        raise bad_field(field, f"should have 1 to {characters} characters (it has {len(text)})")


def _bias_error(message: str) -> ApiError:
    return bad_field("logit_bias", message)
