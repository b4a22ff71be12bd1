"""A conversation in the terminal: answers are printed as they come; an empty line ends it.

pip install openai
python examples/chat.py [--url http://127.0.0.1:8000/v1] [--max-tokens 300]
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Read questions until there is none, with the whole conversation as context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=300)
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key=os.environ.get("SLIPSTREAM_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = []
    while question := _ask(f"{model}> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        chunks = client.chat.completions.create(
            model=model, messages=messages, max_tokens=options.max_tokens, stream=True
        )
        for chunk in chunks:
            text = chunk.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


def _ask(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
