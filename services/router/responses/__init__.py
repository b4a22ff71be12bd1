"""OpenAI's Responses API: requests, output items and their events."""
