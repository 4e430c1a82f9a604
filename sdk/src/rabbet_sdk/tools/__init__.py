"""Commands that the SDK adds to ``rabbet plugins``: bench and bisect."""
