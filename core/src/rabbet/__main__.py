"""``python -m rabbet``."""

from rabbet.cli.main import main

if __name__ == "__main__":
    main()
