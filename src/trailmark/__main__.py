import os
import sys

if sys.path[0] in ("", os.getcwd()):  # `python -m` puts it first; a file there must not pass for a package
    del sys.path[0]

from trailmark.commands.app import main

main()
