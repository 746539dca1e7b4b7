"""A training service that answers the Tinker API: clients train adapters on one model over HTTP."""
