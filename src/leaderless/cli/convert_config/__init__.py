"""Recipes from the configurations of verl and TRL. Imports no torch."""
