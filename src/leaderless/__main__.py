"""`python -m leaderless`, and `torchrun -m leaderless`."""

from leaderless.cli.main import main

if __name__ == "__main__":
    main()
