"""Many questions at once: the server computes them in one batch, and each answer streams.

pip install openai
python examples/side_by_side.py "What is 2 plus 3?" "What is the capital of Peru?"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from openai import AsyncOpenAI

QUESTIONS = ("What is the capital of France?", "What is 17 plus 25?", "Tell me a story.")


async def answer(client: AsyncOpenAI, model: str, question: str, max_tokens: int) -> str:
    """Ask one question; return the answer and how long its first token and all of it took."""
    began_s = time.monotonic()
    first_s = None
    text = ""
    chunks = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
    )
    async for chunk in chunks:
        if delta := chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - began_s
            text += delta
    total_s = time.monotonic() - began_s
    return f"{question}\n  {text}\n  (first text after {first_s or total_s:.3f} s, {total_s:.3f} s)"


async def main() -> None:
    """Ask all questions at the same time and print the answers in their order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=300)
    options = parser.parse_args()
    key = os.environ.get("SLIPSTREAM_API_KEY", "none")
    async with AsyncOpenAI(base_url=options.url, api_key=key) as client:
        model = (await client.models.list()).data[0].id
        asked = (answer(client, model, each, options.max_tokens) for each in options.questions)
        for found in await asyncio.gather(*asked):
            print(found)


if __name__ == "__main__":
    asyncio.run(main())
