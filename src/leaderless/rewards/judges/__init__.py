"""Rewards by language models: what they are asked, how, and what their answers are worth. Imports no torch."""
