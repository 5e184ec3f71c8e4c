"""The entry point of the `tfcdo` command, and of `python -m tfcdo`."""

from __future__ import annotations

import sys

# The extras that install packages which may be missing.
_EXTRAS = {"click": "cli", "rich": "cli", "psutil": "cli", "networkx": "cli", "matplotlib": "plot"}


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from tfcdo.cli import commands

        sys.exit(commands.run(sys.argv[1:]))
    except KeyboardInterrupt:  # While packages are imported.
        print("tfcdo: interrupted", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        remedy = f"in a clone of tfcdo, pip install '.[{_EXTRAS[package]}]'"
        sys.exit(f"tfcdo: {package} is not installed: {remedy}")


if __name__ == "__main__":
    main()
