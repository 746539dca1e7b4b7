"""Episodes: environments, tools and programs in which a policy acts, and the traces of what it did."""
