"""``python -m rabbet_sdk``: the command ``rabbet-sdk``."""

from rabbet_sdk.cli import main

main()
