"""Ollama's native API, for programs that were made for it."""
