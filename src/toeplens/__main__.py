"""The command ``toeplens``, and ``python -m toeplens``."""

from toeplens.start import leave_on_signals


def main() -> None:
    """Run the command line; a signal that comes while it is imported is one sentence too."""
    leave_on_signals()
    from toeplens.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
