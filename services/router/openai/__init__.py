"""OpenAI's chat and text completions: requests, chunks and bodies."""
