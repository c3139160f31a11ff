"""``python -m kvferry.cli``: the same program where its script is not on the path."""

from kvferry.cli.app import main

if __name__ == "__main__":
    main()
