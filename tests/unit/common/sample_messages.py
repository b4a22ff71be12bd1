"""One message of every kind, and the frames that the release before made of them.

`python -m tests.unit.common.sample_messages` prints the frames that today's code makes. Before the
protocol's version is raised they go into `messages/frames_of_previous.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common.link.codec import Codec, pack
from common.messages.address import Address, AttemptId, Route
from common.messages.arrays import Float64s, float32s, int32s, int64s
from common.messages.control import (
    Abort,
    Load,
    Matryoshka,
    ModelCard,
    RouterAlive,
    StepReport,
    WorkerAlive,
)
from common.messages.failure import Ending, Failure, Usage
from common.messages.generate import Generate, StreamHeader
from common.messages.logprobs import Logprobs, PromptLogprobs
from common.messages.queries import (
    Inspection,
    InspectionQuery,
    TimelinePart,
    TimelineQuery,
    Track,
    TrackArg,
)
from common.messages.sampling import GrammarSpec, SamplingParams
from common.messages.text import (
    AttemptRefused,
    Detokenized,
    Part,
    RouterInbox,
    TextGenerated,
    Tokenized,
)
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    OutputRules,
    StreamSettings,
    Structure,
    TextPrompt,
    Tokenize,
    TokenizeQuery,
    TokenLimits,
    ToolInput,
    ToolUse,
)
from common.messages.tokens import DetokenizeQuery, TokenLogprobs, TokensGenerated

SENDER = Address("tcp://127.0.0.1:4000", "5e" * 8)
RECEIVER = Address("ipc:///run/slipstream/receiver.sock", "4e" * 8)
ATTEMPT = AttemptId("70" * 8, 1 << 40)
ROUTE = Route(*(Address(f"tcp://10.0.0.{i}:4000", f"{i}" * 16) for i in range(1, 5)))
FAILURE = Failure(400, "too_long", "the prompt has 9 tokens", "prompt", True, 9, 8)
SAMPLING = SamplingParams(
    max_tokens=16,
    seed=-(1 << 63),
    temperature=0.7,
    top_k=40,
    logit_bias=((7, -1.5), (8, 2.0)),
    stop_token_ids=(2, 3),
    num_logprobs=2,
    num_prompt_logprobs=0,
    grammar_spec=GrammarSpec("start: /a+/", (1, 2), ((3, 4), (5,)), "tools"),
)
HEADER = StreamHeader(
    reply=ROUTE.reply,
    stop=("\n\n", "né"),
    num_logprobs=2,
    prompt_tail_ids=(5, 6),
    accepted_ids=(7,),
    accepted_characters=3,
    traceparent="00-aa-bb-01",
    tool_format="hermes",
    reasoning_format="qwen3",
    reasoning_open=True,
    call_key="key",
    first_counter=9,
    prompt_ids=int32s((1, 70_000)).tobytes(),
)
ENDED = Ending("stop", Usage(5, 4, 3), "\n\n", FAILURE, 1, 2, float32s((0.5, -0.5)).tobytes())


def scored() -> Logprobs:
    """Logprobs of two tokens as the detokenizer has them."""
    logprobs = Logprobs()
    logprobs.add((70_000, 1), (-0.5, -1.0), rank=3)
    logprobs.add((4,), (-0.25,), rank=1)
    logprobs.name(lambda token_id: b"\xc3" * (token_id % 3))
    return logprobs


def tokens(header: bytes) -> TokensGenerated:
    """A step with rows of every kind."""
    step = TokensGenerated(step_id=41)
    step.add(ATTEMPT, 0, (70_000,), header=header, prompt=(5, 4, 0.25))
    step.score(PromptLogprobs(0, 1, scored()))
    logprobs = (TokenLogprobs(-0.5, (8, 9), (-0.5, -2.0)), TokenLogprobs(-1.0, (9, 8), (0.0, -1.0)))
    step.add(AttemptId("other", 2), 17, (8, 9), logprobs)
    step.end(header, ENDED)
    step.extend(
        "other", int64s((3, 4)).tobytes(), int32s((5, 6)).tobytes(), int32s((7, 8)).tobytes()
    )
    return step


def text() -> TextGenerated:
    """Text with rows of every kind."""
    rows = TextGenerated()
    rows.add(1 << 40, 0, (70_000, 4), "hé", scored(), (Part("content", "hé"),))
    rows.open(5, 4, int32s((1, 2)), 0.25)
    rows.score(1, scored())
    rows.add(2, 17, (8,), "", parts=(Part("call", "f", 1, "id"), Part("arguments", "{", 1)))
    rows.end(ENDED)
    return rows


def tokenize(prompt: Any, **more: Any) -> Tokenize:
    limits, stream = TokenLimits(100, 90, 80, 70_001), StreamSettings(("x",), parse_tools=True)
    times = {"admitted_at_s": 1.5, "output_ids": int32s((1, 2))}
    return Tokenize(ATTEMPT, ROUTE, prompt, SAMPLING, stream, limits, **times, **more)


def alive(**more: Any) -> WorkerAlive:
    steps = StepReport(1, 2, 3, (("plan", 0.5, 1.0),), 0.25, 4)
    matryoshka = Matryoshka((64, 128), True)
    return WorkerAlive(
        service="compute",
        address=SENDER,
        model=ModelCard("m", "r", 9, 8, 7, 6, (("top_p", 0.5),), "mean", ("a",), matryoshka),
        load=Load(1, 2, 3, 0.5, steps),
        beat=4,
        progress=5,
        stall_after_s=6.0,
        draining=True,
        open_counters=int64s((1, 1 << 40)),
        **more,
    )


def seconds(*values: float) -> Float64s:
    return type(float32s())("d", values)


def samples(header: bytes, **of_heartbeat: Any) -> dict[str, Any]:
    """Return the messages, by name; `header` is the packed one of a stream."""
    rules = OutputRules(
        Structure("json_schema", "{}", "response_format", True, True),
        ToolUse("named", "f", False, (ToolInput("f", "start: /a/"),)),
        5,
        (1, 2),
        ("bad",),
    )
    chat = ChatPrompt(b"[]", b"[{}]", False, True, b"{}")
    track = Track("host", "plan", seconds(1.0), seconds(2.0), (TrackArg("rows", seconds(3.0)),))
    return {
        "tokenize chat": tokenize(chat, num_choices=3, rules=rules, pooling=True),
        "tokenize text": tokenize(TextPrompt("né", False), truncate_to=5, truncate_side="right"),
        "tokenize ids": tokenize(IdsPrompt(int32s((1, 70_000))), cache_salt="s", priority=-1),
        "tokenize query": TokenizeQuery(ATTEMPT, ROUTE.reply, chat, "messages", True, "00-aa"),
        "generate": Generate(
            *(ATTEMPT, ROUTE.detokenizer, int32s((1, 70_000)).tobytes(), int32s((3,)), SAMPLING),
            *(header, 1.5, 3, 1, -1, "salt", "00-aa", True),
        ),
        "tokens": tokens(header),
        "text": text(),
        "abort": Abort(ATTEMPT, "client_gone"),
        "alive": alive(**of_heartbeat),
        "answer": RouterAlive(ROUTE.reply, 4, 2, True),
        "detokenize query": DetokenizeQuery(
            ATTEMPT, ROUTE.reply, int32s((1, 2)), True, "00-aa", True
        ),
        "refused": AttemptRefused(ATTEMPT, 3, FAILURE),
        "tokenized": Tokenized(ATTEMPT, int32s((1, 2)), ("a", "é"), FAILURE),
        "detokenized": Detokenized(ATTEMPT, "né", FAILURE),
        "timeline query": TimelineQuery(ATTEMPT, ROUTE.reply, 2.5),
        "timeline": TimelinePart(ATTEMPT, 1.5, (track,)),
        "inspection query": InspectionQuery(ATTEMPT, ROUTE.reply, "prefix_cache_reset"),
        "inspection": Inspection(ATTEMPT, b"{}"),
    }


def main(**of_heartbeat: Any) -> None:
    codec, header = Codec(RouterInbox), pack(HEADER)
    frames = {
        name: [frame.hex() for frame in codec.encode(message, RECEIVER, SENDER)]
        for name, message in samples(header, **of_heartbeat).items()
    }
    json.dump({**frames, "stream header": [header.hex()]}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
