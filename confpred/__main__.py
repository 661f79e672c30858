"""``python -m confpred``: the `confpred` command."""

from confpred.cli import main

if __name__ == "__main__":
    main()
