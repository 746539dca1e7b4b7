"""Policies of bodies, small ones and models of vision, language and action."""
