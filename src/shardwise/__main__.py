"""`python -m shardwise`."""

import sys

from shardwise.base.process.ending import leave_code
from shardwise.commands.cli import main

if __name__ == "__main__":
    code = main()
    leave_code(code)
    sys.exit(code)
