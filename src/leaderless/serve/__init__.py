"""Answers requests of OpenAI's API with a model, until it is stopped. Only this package imports web libraries."""
