"""Automatic placement: chooses the layout of a recipe by measured seconds. Pure functions; imports no torch."""
