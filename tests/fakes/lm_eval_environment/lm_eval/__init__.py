"""A stand-in for lm-eval: it reads the same settings, asks the same server, and writes results of the same form."""
