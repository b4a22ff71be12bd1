"""What the demo model is trained on and how; knows nothing of the server."""
