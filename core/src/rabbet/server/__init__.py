"""The HTTP server in OpenAI's shape. No torch."""
