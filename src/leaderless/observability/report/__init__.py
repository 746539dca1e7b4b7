"""One HTML file about a run: curves, warnings, samples, plan and recipe. It loads nothing and needs no torch."""
