"""Real arms: a server next to each arm, which keeps it within its limits whatever clients send. Imports no torch."""
