"""What a stage is given besides its rows."""
