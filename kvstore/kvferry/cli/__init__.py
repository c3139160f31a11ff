"""The command line: ``kvferry COMMAND``.

Every command is one module here, named in :data:`kvferry.cli.app.COMMANDS` and imported only when it is run.
"""

from kvferry.cli.app import main

__all__ = ["main"]
