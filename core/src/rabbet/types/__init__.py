"""Plain data that crosses module, thread and process borders. Imports no torch."""
