"""`python -m leaderless`, and `torchrun -m leaderless`."""

import signal

if __name__ == "__main__":
    # There is nothing to save yet: Ctrl-C ends this process without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from leaderless.cli.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
