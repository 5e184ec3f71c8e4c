"""The entry point of the `tfcdo` command: a user's mistake is reported in one line."""

from __future__ import annotations

import sys

# A module that may be missing: its name for pip, and the extra that brings it.
_EXTRAS = {
    "click": ("click", "cli"),
    "rich": ("rich", "cli"),
    "psutil": ("psutil", "cli"),
    "matplotlib": ("matplotlib", "plot"),
}


def main() -> None:
    """Runs the command line and exits with its status."""
    try:
        from tfcdo.cli import commands

        sys.exit(commands.run(sys.argv[1:]))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        package, extra = _EXTRAS[missing]
        sys.exit(
            f"tfcdo: {package} is not installed: in a clone of tfcdo, pip install '.[{extra}]'"
        )


if __name__ == "__main__":
    main()
