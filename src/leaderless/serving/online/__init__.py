"""Responses that clients have asked for, until their feedback has come and a step takes them."""
