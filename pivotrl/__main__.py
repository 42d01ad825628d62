"""`python -m pivotrl`, the same as the `pivotrl` command."""

from pivotrl.cli import main

if __name__ == "__main__":
    main()
