"""The engine: its loop, its process, and the client that a front end holds."""
