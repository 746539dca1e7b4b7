"""Answers requests of OpenAI's API with a model, until it is stopped. Only this package and `ui` import web code."""
