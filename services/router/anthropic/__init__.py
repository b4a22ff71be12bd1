"""Anthropic's Messages API: requests, content blocks and their events."""
