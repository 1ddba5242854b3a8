"""The command line: everything that typer sees."""
